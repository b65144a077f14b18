/* modelcache.h: the C99 interface of libmodelcache.so.
 *
 * A client asks the daemon for a model; the library maps the model's memory into this process,
 * private and copy-on-write, and describes the tensors in it. Nothing here knows libtorch.
 *
 *   mc_client *client = NULL;
 *   mc_model *model = NULL;
 *   const char *path = "model.safetensors";
 *   if (mc_client_connect(NULL, &client) == MC_OK &&
 *       mc_model_open(client, &path, 1, NULL, &model) == MC_OK) {
 *     mc_tensor tensor = {.struct_size = sizeof tensor};
 *     if (mc_model_tensor_by_name(model, "weight", &tensor) == MC_OK) { use(tensor.data); }
 *   } else {
 *     fputs(mc_last_error(), stderr);
 *   }
 *   mc_model_close(model);
 *   mc_client_close(client);
 *
 * Status: every call that can fail returns an mc_status; the message behind it is in
 * mc_last_error(). After a failure the `out` arguments are untouched unless a call says otherwise.
 * Threads: every function may be called from any thread at any time, on the same objects too,
 * except that an object must not be used by one thread while another gives up its last reference.
 * Fork: a child may use inherited clients and models. It gets a connection of its own when it
 * first needs one, never speaks on its parent's, and ends no lease of its parent.
 * Signals: no call changes a signal handler or mask; interrupted system calls are repeated.
 * Growing structs start with `struct_size`, which the caller sets to sizeof the struct; the rest
 * may be zero, which always means the default. A library older than the caller refuses fields it
 * does not know unless they are zero.
 * Text is UTF-8 and ends with a zero byte unless a call says otherwise; paths are any bytes.
 */
#ifndef MODELCACHE_MODELCACHE_H_
#define MODELCACHE_MODELCACHE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MC_API __attribute__((visibility("default")))
#else
#define MC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status --------------------------------------------------------------------------------- */

typedef int32_t mc_status;

/* The numbers never change; new ones are added at the end. */
enum {
  MC_OK = 0,
  MC_INVALID_ARGUMENT = 1, /* the caller passed something no daemon could accept */
  MC_NOT_FOUND = 2,        /* no such model, tensor or file */
  MC_TIMEOUT = 3,          /* the caller's deadline passed */
  MC_UNAVAILABLE = 4,      /* no daemon answers, or it is shutting down */
  MC_PROTOCOL = 5,         /* the daemon sent something outside the protocol */
  MC_VERSION = 6,          /* no common protocol version */
  MC_PERMISSION = 7,       /* this user may not do this */
  MC_SYSTEM = 8,           /* a system call failed */
  MC_NO_ROOM = 9,          /* the memory budget cannot hold it */
  MC_BAD_FILE = 10,        /* the model file is malformed */
  MC_UNSUPPORTED = 11,     /* a format, dtype or option this build does not know */
  MC_FILE_CHANGED = 12,    /* the file changed while it was being read */
  MC_LOADER_FAILED = 13,   /* the loader process died or was killed */
  MC_IN_USE = 14,          /* leases or a pin forbid it */
  MC_CANCELLED = 15,       /* withdrawn before it finished */
  MC_LIMIT = 16,           /* a resource limit was met (descriptors, message size, queue) */
  MC_CORRUPT = 17,         /* an arena is not what its description says */
  MC_INTERNAL = 18,        /* a fault of modelcache itself */
  MC_ALREADY_RUNNING = 19  /* another daemon serves this socket */
};

/* The stable lower-case name of a status ("no_room"), "unknown" for any other number. Static. */
MC_API const char* mc_status_text(mc_status status);

/* The whole message of the last call that failed in this thread; "" when none did. Valid until the
 * next failing call of this thread. Never NULL. */
MC_API const char* mc_last_error(void);

/* errno of the system call behind mc_last_error(), 0 when there was none. */
MC_API int32_t mc_last_errno(void);

/* What the loader of a Python call sent with the failure behind mc_last_error(), text of its own
 * kind;
 * "" when nothing. As mc_last_error. */
MC_API const char* mc_last_error_detail(void);

/* Version of this library, "0.1.0". Static. */
MC_API const char* mc_version(void);

/* Frees text that a call handed over. NULL is allowed. */
MC_API void mc_free(void* text);

/* ---- element types -------------------------------------------------------------------------- */

/* dtype numbers run from 1 to mc_dtype_count(). Names are those of PyTorch ("float32",
 * "float8_e4m3fn", "float4_e2m1fn_x2"); "float6_e2m3" and "float6_e3m2" have no PyTorch type. */
MC_API uint32_t mc_dtype_count(void);

/* Name of a dtype; "" for an unknown number. Static. */
MC_API const char* mc_dtype_name(uint32_t dtype);

/* Bits of one element (float4_e2m1fn_x2: of the packed pair); 0 for an unknown number. */
MC_API uint32_t mc_dtype_bits(uint32_t dtype);

/* ---- client --------------------------------------------------------------------------------- */

/* A connection to the daemon. */
typedef struct mc_client mc_client;

enum {
  MC_AUTOSTART_DEFAULT = 0, /* start a daemon unless MODELCACHE_AUTOSTART=0 */
  MC_AUTOSTART_NEVER = 1,
  MC_AUTOSTART_ALWAYS = 2
};

typedef struct mc_client_options {
  uint32_t struct_size;
  uint32_t autostart;      /* MC_AUTOSTART_*: what to do when no daemon answers */
  const char* socket_path; /* NULL: as mc_default_socket_path() */
  const char* daemon_path; /* program to start; NULL: $MODELCACHE_DAEMON, else the `modelcached`
                              that belongs to this library, else the one on $PATH */
  int64_t timeout_ms;      /* for connecting, starting included; 0: 10,000. A later call that has
                              to connect again keeps its own deadline, or else this or 10,000,
                              whichever is longer */
} mc_client_options;

/* Connects, starting a daemon for this user when none answers and `options` allow it. When many
 * processes do so at once, one daemon remains and serves all. The folder of a socket that was
 * named, here or by $MODELCACHE_SOCKET, is never made: without it nothing is started
 * (MC_UNAVAILABLE). `options` may be NULL. The caller owns *out and gives it back with
 * mc_client_close.
 * Errors: MC_UNAVAILABLE (nobody answers), MC_TIMEOUT, MC_VERSION, MC_PERMISSION, MC_PROTOCOL,
 * MC_INVALID_ARGUMENT (socket path of more than 107 bytes), MC_LIMIT, MC_SYSTEM. */
MC_API mc_status mc_client_connect(const mc_client_options* options, mc_client** out);

/* Gives up the client. Models opened from it stay valid: they share the connection. NULL is
 * allowed. */
MC_API void mc_client_close(mc_client* client);

typedef struct mc_client_info {
  uint32_t struct_size;
  uint32_t protocol_version;
  const char* socket_path;
  const char* daemon_version;
  int64_t daemon_pid; /* in the daemon's own PID namespace */
  uint32_t started;   /* 1 when this client started the daemon */
  uint32_t reserved;
} mc_client_info;

/* What the client knows of its daemon, without asking it. The texts belong to the client.
 * Errors: MC_INVALID_ARGUMENT. */
MC_API mc_status mc_client_get_info(mc_client* client, mc_client_info* out);

/* Where the daemon listens unless told otherwise: $MODELCACHE_SOCKET, else
 * $XDG_RUNTIME_DIR/modelcache/socket, else /run/modelcache/socket where this user may use it, else
 * /tmp/modelcache-<uid>/socket. The caller frees *out with mc_free.
 * Errors: MC_INVALID_ARGUMENT (too long). */
MC_API mc_status mc_default_socket_path(char** out);

/* Sends a control request and waits for the answer. `argument` is a JSON object or NULL.
 *
 *   method    argument                 reply: a JSON object, docs/protocol.md names its members
 *   list      -                        {"models": [...]}
 *   status    -                        {"daemon_pid": ..., "arena_bytes": ..., ...}
 *   why       {"model": M}             {"model", "state", "history": [...]}
 *   evict     {"model": M}             {}
 *   pin       {"model": M}             {}
 *   unpin     {"model": M}             {}
 *   verify    {"model": M}             {"ok", "memory_ok", "storages", "bytes", "disk",
 *                                       "differences": [...]}
 *   metrics   -                        {"text": "..."}, Prometheus text
 *   shutdown  -                        {}
 *
 * M is a name, an id, at least 6 digits of one, or a path; a relative path is made whole as for an
 * open. Any argument may have "timeout_ms" (default 10,000; verify: one hour). The caller frees
 * *reply with mc_free.
 * Errors: MC_INVALID_ARGUMENT (method or argument), MC_UNAVAILABLE, MC_TIMEOUT, MC_PROTOCOL, and
 * whatever the daemon answers. */
MC_API mc_status mc_call(mc_client* client, const char* method, const char* argument, char** reply);

/* ---- models --------------------------------------------------------------------------------- */

/* A model mapped into this process. Its memory and the daemon's lease live until the last
 * reference is closed. */
typedef struct mc_model mc_model;

/* Reports a cold load, about ten times a second at most, in the thread that opens, which must not
 * open through the same client from inside. `total` is 0 while unknown. A result other than 0
 * gives up waiting: the open fails with MC_CANCELLED. */
typedef int32_t (*mc_progress_fn)(void* user, uint64_t done_bytes, uint64_t total_bytes);

enum {
  MC_OPEN_PIN = 1 /* keep the model resident until it is unpinned */
};

typedef struct mc_open_options {
  uint32_t struct_size;
  uint32_t flags;     /* MC_OPEN_* */
  const char* name;   /* display name; NULL: the path. A model that is resident keeps its own:
                         mc_info.reason then says so */
  const char* format; /* auto|safetensors|torch|torchscript|npz; NULL: auto, told from content */
  const char* device; /* cpu|cuda[:N], only for formats that are built on a device; NULL: cpu */
  int64_t timeout_ms; /* of the whole call, which ends at most 200 ms later whatever the daemon
                         does; 0: $MODELCACHE_LOAD_TIMEOUT (seconds), else without limit */
  mc_progress_fn progress; /* may be NULL */
  void* progress_user;     /* passed to `progress` */
} mc_open_options;

/* Gives the model in these files: mapped at once when it is resident, else after the daemon has
 * loaded it. One path may be a file, a folder with a model in it, or an index file that names its
 * shards (*.index.json). Several paths are the files of one model: an index and its shards, or
 * safetensors files without an index, no two with a tensor of one name. At most 253 files. The
 * files are opened by this process, read-only: the daemon sees descriptors, never paths.
 * `options` may be NULL. The caller owns one reference to *out.
 * Errors: MC_INVALID_ARGUMENT, MC_NOT_FOUND, MC_PERMISSION, MC_TIMEOUT, MC_CANCELLED,
 * MC_UNAVAILABLE (after one attempt to reconnect), MC_NO_ROOM, MC_BAD_FILE, MC_UNSUPPORTED,
 * MC_FILE_CHANGED, MC_LOADER_FAILED, MC_LIMIT, MC_CORRUPT and MC_PROTOCOL (the daemon's answer
 * cannot be trusted), MC_SYSTEM. */
MC_API mc_status mc_model_open(mc_client* client, const char* const* paths, size_t path_count,
                               const mc_open_options* options, mc_model** out);

/* Gives a model that is resident already, by name, id (or at least 6 digits of it) or path.
 * Errors: MC_NOT_FOUND when it is not resident; otherwise as mc_model_open. */
MC_API mc_status mc_model_open_resident(mc_client* client, const char* model, mc_model** out);

/* True (1 in *written) when this process, or one it was forked from, has written to the model's
 * memory: its content is no longer that of the cache. Tells pages apart, not bytes. Errors:
 * MC_INVALID_ARGUMENT, MC_SYSTEM (the kernel does not tell). */
MC_API mc_status mc_model_is_written(const mc_model* model, uint32_t* written);

/* Adds a reference and returns `model`. NULL gives NULL. */
MC_API mc_model* mc_model_retain(mc_model* model);

/* Gives up one reference. The last one unmaps the memory and ends the lease; never blocks on the
 * daemon. NULL is allowed. */
MC_API void mc_model_close(mc_model* model);

typedef struct mc_info {
  uint32_t struct_size;
  uint32_t hit;         /* 1 when the model was resident */
  const char* reason;   /* why it was a hit or a miss */
  const char* name;     /* display name */
  const char* model_id; /* 32 hexadecimal digits */
  const char* format;   /* "safetensors", "torch", "torchscript", ... */
  uint64_t lease;
  double load_seconds;    /* what the cold load took */
  uint64_t payload_bytes; /* of the storages, shared bytes once */
  uint32_t arena_count;
  uint32_t tensor_count;
  uint32_t storage_count;
  uint32_t reserved;
} mc_info;

/* The texts belong to the model. Errors: MC_INVALID_ARGUMENT. */
MC_API mc_status mc_model_info(const mc_model* model, mc_info* out);

/* The model's metadata, a JSON object; docs/protocol.md lists the members ("metadata",
 * "structure", "files", ...). *text belongs to the model and need not end with a zero byte.
 * Errors: MC_INVALID_ARGUMENT. */
MC_API mc_status mc_model_metadata(const mc_model* model, const char** text, uint64_t* text_bytes);

/* ---- Python calls --------------------------------------------------------------------------- */

/* The result of a call of Python, kept as a model of the format "python": one storage is a pickle
 * stream, the others are what it refers to. The daemon never looks into either. Whoever unpickles
 * it runs what the loader wrote: both functions refuse a daemon of another user. */

/* Gives the resident entry of the call with this key, 32 hexadecimal digits. Errors: MC_NOT_FOUND,
 * MC_UNSUPPORTED (the daemon remembers that the call cannot be cached, and why), MC_PERMISSION;
 * otherwise as mc_model_open. */
MC_API mc_status mc_entry_find(mc_client* client, const char* key, mc_model** out);

typedef struct mc_entry_options {
  uint32_t struct_size;
  uint32_t flags;   /* MC_OPEN_* */
  const char* key;  /* 32 hexadecimal digits */
  const char* name; /* what people call it; NULL: the key */
  const char* const*
      arguments; /* of the loader: the absolute path of a program, then its arguments */
  size_t argument_count;
  const char* const* environment; /* "NAME=value", all that the loader gets */
  size_t environment_count;
  const char* folder;  /* absolute; where the loader starts */
  const void* payload; /* the call, for the loader alone */
  uint64_t payload_bytes;
  const char* stale;        /* id of the entry that the caller found out of date, or NULL */
  const char* stale_reason; /* what is out of date about it, or NULL */
  int64_t timeout_ms;       /* as mc_open_options */
  mc_progress_fn progress;
  void* progress_user;
} mc_entry_options;

/* Gives the entry of a call: the resident one, unless it is `stale`; else the one that a load in
 * progress makes; else one that the daemon has made by a loader it starts as the options say.
 * Errors: as mc_model_open; MC_LOADER_FAILED and others of the loader's choice, with
 * mc_last_error_detail; MC_UNSUPPORTED (the call cannot be cached, or the daemon lives in another
 * container), MC_PERMISSION (it belongs to another user), MC_LIMIT (over 1 MiB without payload). */
MC_API mc_status mc_entry_make(mc_client* client, const mc_entry_options* options, mc_model** out);

/* ---- tensors -------------------------------------------------------------------------------- */

#define MC_NO_STORAGE UINT32_C(0xFFFFFFFF) /* storage number of a tensor without data */

/* Bits of mc_tensor.flags. */
enum {
  MC_TENSOR_REQUIRES_GRAD = 1,
  MC_TENSOR_CONJUGATE = 2,
  MC_TENSOR_NEGATIVE = 4,
  MC_TENSOR_PARAMETER = 8 /* was an nn.Parameter */
};

/* One tensor. Pointers belong to the model and live as long as it does. The memory at `data` is
 * writable; writes are seen by this process alone (by every tensor of this mc_model that shares
 * the storage). */
typedef struct mc_tensor {
  uint32_t struct_size;
  uint32_t dtype;
  const char* name;
  const int64_t* shape;  /* `ndim` sizes */
  const int64_t* stride; /* `ndim` strides, in elements */
  uint32_t ndim;
  uint32_t flags;         /* MC_TENSOR_* */
  void* data;             /* first element; NULL without storage */
  uint64_t nbytes;        /* from the first element to the end of the last one */
  void* storage_data;     /* first byte of the storage; NULL without storage */
  uint64_t storage_bytes; /* size of the whole storage */
  uint64_t offset_bytes;  /* of `data` in the storage */
  uint32_t storage;       /* number of the storage, or MC_NO_STORAGE */
  uint32_t index;         /* number of the tensor */
  uint64_t name_bytes;    /* without the final zero byte */
} mc_tensor;

/* Number of tensors; 0 for NULL. */
MC_API uint64_t mc_model_tensor_count(const mc_model* model);

/* Tensors are numbered in the order of the file. Errors: MC_INVALID_ARGUMENT, MC_NOT_FOUND (index
 * out of range). */
MC_API mc_status mc_model_tensor_at(const mc_model* model, uint64_t index, mc_tensor* out);

/* Errors: MC_INVALID_ARGUMENT, MC_NOT_FOUND. */
MC_API mc_status mc_model_tensor_by_name(const mc_model* model, const char* name, mc_tensor* out);

typedef struct mc_storage {
  uint32_t struct_size;
  uint32_t arena;        /* number of the arena it lies in */
  void* data;            /* never shared with another storage of the same mc_model; not NULL */
  uint64_t nbytes;       /* may be 0 */
  uint64_t offset_bytes; /* in the arena */
} mc_storage;

/* Number of storages; 0 for NULL. */
MC_API uint64_t mc_model_storage_count(const mc_model* model);

/* Errors: MC_INVALID_ARGUMENT, MC_NOT_FOUND (index out of range). */
MC_API mc_status mc_model_storage_at(const mc_model* model, uint64_t index, mc_storage* out);

/* ---- everything at once --------------------------------------------------------------------- */

/* The tables as they lie in the arena, little-endian, checked when the model was opened. They let
 * a binding read a thousand tensors without a thousand calls. Python's struct module reads them as
 * "<QIIQQIHHII" (mc_tensor_record), "<IIQQ16s16s" (mc_storage_record). */
typedef struct mc_tensor_record {
  uint64_t name_offset; /* from mc_tables.base */
  uint32_t name_bytes;
  uint32_t storage; /* or MC_NO_STORAGE */
  uint64_t offset_bytes;
  uint64_t nbytes;
  uint32_t dimensions_index; /* into mc_tables.dimensions: `ndim` sizes, then `ndim` strides */
  uint16_t ndim;
  uint16_t dtype;
  uint32_t flags;
  uint32_t reserved;
} mc_tensor_record;

typedef struct mc_storage_record {
  uint32_t arena;
  uint32_t flags;
  uint64_t offset_bytes;
  uint64_t nbytes;
  uint8_t digest[16];
  uint8_t sample[16];
} mc_storage_record;

typedef struct mc_tables {
  uint32_t struct_size;
  uint32_t tensor_count;
  uint32_t storage_count;
  uint32_t reserved;
  const char* base;    /* what name_offset counts from */
  uint64_t base_bytes; /* bytes there */
  const mc_tensor_record* tensors;
  const mc_storage_record* storages;
  void* const* storage_data; /* `storage_count` addresses, as mc_storage.data */
  const int64_t* dimensions;
  uint64_t dimension_count;
} mc_tables;

/* All pointers belong to the model. Errors: MC_INVALID_ARGUMENT. */
MC_API mc_status mc_model_tables(const mc_model* model, mc_tables* out);

/* Tensors as DLPack structs (DLManagedTensor, the unversioned form), for frameworks that build a
 * tensor from one faster than from its parts. `count` must be mc_model_tensor_count; out[i] becomes
 * the struct of tensor i, or NULL where that would lose something: the tensor does not cover its
 * storage alone and exactly, has no bytes, has flags, or has a type that DLPack consumers may not
 * know. The caller owns each struct and gives it up by calling its deleter, from any thread; each
 * holds a reference on the model. After a failure nothing is owned.
 * Errors: MC_INVALID_ARGUMENT, MC_LIMIT (memory). */
MC_API mc_status mc_model_dlpack(mc_model* model, uint64_t count, void** out);

/* ---- quantized tensors ---------------------------------------------------------------------- */

/* How the integers of a quantized tensor stand for numbers. Pointers belong to the model. */
typedef struct mc_quantization {
  uint32_t struct_size;
  uint32_t per_channel; /* 0: `scale` and `zero_point`; 1: `count` of them along `axis` */
  double scale;
  int64_t zero_point;
  int64_t axis;
  uint64_t count;
  const double* scales;
  const double* zero_points; /* floating-point in the float_qparams scheme, else whole numbers */
  uint32_t float_qparams;    /* 1: per_channel_affine_float_qparams */
  uint32_t reserved;
} mc_quantization;

/* Errors: MC_INVALID_ARGUMENT, MC_NOT_FOUND (not a quantized tensor). */
MC_API mc_status mc_model_quantization(const mc_model* model, uint64_t index, mc_quantization* out);

/* ---- TorchScript modules -------------------------------------------------------------------- */

/* A module kept as an archive that holds its code and no tensor bytes; those are records, one
 * storage each. torch.hpp rebuilds a torch::jit::Module from it. */
typedef struct mc_script {
  uint32_t struct_size;
  uint32_t archive;          /* number of the storage that holds the archive */
  uint32_t record_count;     /* for mc_model_script_record_at */
  uint32_t extra_file_count; /* for mc_model_extra_file_at */
} mc_script;

/* Errors: MC_INVALID_ARGUMENT, MC_NOT_FOUND (the model is no TorchScript module), MC_CORRUPT (its
 * description does not fit its storages). */
MC_API mc_status mc_model_script(const mc_model* model, mc_script* out);

/* Name ("0.storage") and storage number of a record. *name belongs to the model.
 * Errors: as mc_model_script; MC_NOT_FOUND (index out of range). */
MC_API mc_status mc_model_script_record_at(const mc_model* model, uint64_t index, const char** name,
                                           uint32_t* storage);

/* Name and bytes of a file that was saved with the module (_extra_files). Both belong to the
 * model. Errors: as mc_model_script_record_at. */
MC_API mc_status mc_model_extra_file_at(const mc_model* model, uint64_t index, const char** name,
                                        const char** bytes, uint64_t* byte_count);

/* ---- knapsack ------------------------------------------------------------------------------- */

/* The exact 0/1 knapsack behind the recompute planner; needs no daemon. docs/planner.md. */

enum {
  MC_KNAPSACK_AUTO = 0, /* what is fastest; the only method that combines the other two */
  MC_KNAPSACK_LIST = 1, /* lists of undominated states */
  MC_KNAPSACK_DENSE = 2 /* tables over every capacity: time grows with count x capacity */
};

/* Values of mc_knapsack.pins. */
enum { MC_KNAPSACK_FREE = 0, MC_KNAPSACK_IN = 1, MC_KNAPSACK_OUT = 2 };

/* Values of mc_knapsack_result.end. */
enum {
  MC_KNAPSACK_OPTIMAL = 0,
  MC_KNAPSACK_WITHIN_TOLERANCE = 1, /* the bound is within the gap that was asked for */
  MC_KNAPSACK_LIMIT = 2 /* the work or memory limit ended the search; the bound is still proven */
};

typedef struct mc_knapsack {
  uint32_t struct_size;
  uint32_t method;            /* MC_KNAPSACK_AUTO, _LIST or _DENSE */
  uint64_t count;             /* items */
  const uint64_t* weights;    /* bytes, or any unit; or NULL and `real_weights` */
  const double* real_weights; /* fractions of anything; or NULL and `weights` */
  const double* values;       /* seconds, or any unit */
  const uint8_t* pins;        /* MC_KNAPSACK_FREE, _IN or _OUT for each item; NULL: all free */
  uint64_t capacity;          /* for `weights` */
  double real_capacity;       /* for `real_weights` */
  double quantum;      /* for `real_weights`: above 0, each is rounded up to a multiple of it and
                          the capacity down; 0: no quanta */
  double absolute_gap; /* the answer may be worth this much less than the optimum, */
  double relative_gap; /* or this part of the optimum, whichever is more */
  uint64_t memory_limit_bytes; /* of states and tables; 0: 64 MiB */
  uint64_t work_limit;         /* states generated, about 20 ns each; 0: 100,000,000 */
  uint32_t threads;            /* 2: large tables use a second thread during the call; 0: 1 */
  uint32_t reserved;
} mc_knapsack;

typedef struct mc_knapsack_result {
  uint32_t struct_size;
  uint32_t end;         /* MC_KNAPSACK_OPTIMAL, _WITHIN_TOLERANCE or _LIMIT */
  double value;         /* of what was taken */
  double bound;         /* no choice is worth more */
  uint64_t weight;      /* of what was taken, in units */
  uint64_t capacity;    /* in units; weight <= capacity always */
  double units_per_one; /* units in a weight of 1; 1 for `weights` */
  uint64_t work;        /* as counted against work_limit */
  uint64_t peak_states; /* longest list of states */
} mc_knapsack_result;

/* Chooses items within the capacity so that their value is largest: taken[i] becomes 1 or 0. Equal
 * input gives the equal answer, on every machine: there is no clock in it. Items of value 0 are not
 * taken, items of weight 0 are, pins apart.
 * `real_weights` that are multiples of 1/10,000 or of 10^-9, as near as a double can be, count as
 * such: 0.1 and 0.2 fit into 0.3. Otherwise rounding goes against the choice, never over the
 * capacity. Values are rounded by less than 2^-60 of their sum. `out` may be NULL.
 * Errors: MC_INVALID_ARGUMENT; the message names list and index: NaN, infinity or a negative
 * number, sums of 2^57 units of weight or more among items that fit one by one, pins above the
 * capacity. MC_LIMIT: more than 16,777,216 items; the tables of MC_KNAPSACK_DENSE need more memory
 * than allowed; out of memory. */
MC_API mc_status mc_knapsack_solve(const mc_knapsack* problem, uint8_t* taken,
                                   mc_knapsack_result* out);

#ifdef __cplusplus
}
#endif

#endif /* MODELCACHE_MODELCACHE_H_ */
