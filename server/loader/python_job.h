/* python_job.h: the C99 interface of libmodelcache_loader.so, for the Python process that makes the
 * entry of a call. The package modelcache calls it by ctypes; nothing here knows Python or
 * libtorch.
 *
 * The daemon starts the process with one end of a socket pair, takes at most one result or failure
 * from it, and kills it when nobody waits any more. Status numbers are those of modelcache.h.
 * Threads: every function may be called from any thread; calls of one job wait for each other, but
 * for mc_job_progress. Texts are UTF-8 and end with a zero byte unless a length comes with them.
 */
#ifndef MODELCACHE_SERVER_LOADER_PYTHON_JOB_H_
#define MODELCACHE_SERVER_LOADER_PYTHON_JOB_H_

#include <stddef.h>
#include <stdint.h>

#define MC_JOB_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mc_job mc_job;

/* Takes the job that waits at `descriptor`, which belongs to the job from then on, and ties this
 * process's life to its parent's. The caller gives *out back with mc_job_close.
 * Errors: invalid_argument (no socket), unavailable (the daemon is gone), protocol, limit, system.
 */
MC_JOB_API int32_t mc_job_receive(int32_t descriptor, mc_job** out);

/* The sealed memfd with what the client wants called. It belongs to the job; -1 for NULL. */
MC_JOB_API int32_t mc_job_payload(const mc_job* job);

/* Tells those who wait how far the call is; `total` is 0 while unknown. Sent at most ten times a
 * second, and not at all while another call of the job runs. Errors: as mc_job_receive. */
MC_JOB_API int32_t mc_job_progress(mc_job* job, uint64_t done_bytes, uint64_t total_bytes);

typedef struct mc_job_storage {
  const void* data; /* may be NULL when nbytes is 0 */
  uint64_t nbytes;
} mc_job_storage;

/* A named view of a storage: what lists and tables show. */
typedef struct mc_job_tensor {
  const char* name;
  uint64_t name_bytes;
  const char* dtype;     /* PyTorch's name */
  const int64_t* shape;  /* `ndim` sizes */
  const int64_t* stride; /* `ndim` strides, in elements */
  uint32_t ndim;
  uint32_t storage; /* number of the storage; 0xFFFFFFFF without data */
  uint64_t offset_bytes;
  uint32_t flags; /* MC_TENSOR_* of modelcache.h */
  uint32_t reserved;
} mc_job_tensor;

typedef struct mc_job_result {
  uint32_t struct_size;
  uint32_t reserved;
  const mc_job_storage* storages;
  uint64_t storage_count;
  const mc_job_tensor* tensors;
  uint64_t tensor_count;
  const char* metadata; /* a JSON object */
  uint64_t metadata_bytes;
} mc_job_result;

/* Puts the storages into arenas, each once, borrows those that another entry or model holds
 * already, and returns once the daemon has sealed all and answers those who wait. The storages must
 * not change meanwhile. What is wrong with a tensor is found before anything is asked for: then the
 * call may be repeated with another result. A daemon without room ends the process instead of
 * answering. Errors: invalid_argument, bad_file (a tensor outside of its storage, or a name twice),
 * unsupported (an unknown dtype), limit, and as mc_job_receive. */
MC_JOB_API int32_t mc_job_commit(mc_job* job, const mc_job_result* result);

/* Fails the job. `status` is the name of one ("loader_failed"; after "unsupported" the daemon
 * remembers that this call cannot be cached), `message` is for people and logs. `detail`, text of
 * at most 384 KiB or NULL, goes to those who wait and nowhere else; a longer one is left out.
 * Errors: invalid_argument, and as mc_job_receive. */
MC_JOB_API int32_t mc_job_fail(mc_job* job, const char* status, const char* message,
                               const char* detail);

/* Closes the channel. NULL is allowed. */
MC_JOB_API void mc_job_close(mc_job* job);

/* Of the last call that failed in this thread. The text is valid until the next one. */
MC_JOB_API const char* mc_job_last_error(void);
MC_JOB_API int32_t mc_job_last_errno(void);

#ifdef __cplusplus
}
#endif

#endif /* MODELCACHE_SERVER_LOADER_PYTHON_JOB_H_ */
