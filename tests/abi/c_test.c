/* A C99 program with the C interface: argument checks, error texts, and a model when a daemon can
 * be started (c_test PATH); without arguments it needs none. */
#include <modelcache/modelcache.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

static void expect(int condition, const char* what) {
  if (!condition) {
    (void)fprintf(stderr, "failed: %s (last error: %s)\n", what, mc_last_error());
    ++failures;
  }
}

static void check_names(void) {
  uint32_t dtype;
  expect(strcmp(mc_status_text(MC_OK), "ok") == 0, "name of MC_OK");
  expect(strcmp(mc_status_text(MC_BAD_FILE), "bad_file") == 0, "name of MC_BAD_FILE");
  expect(strcmp(mc_status_text(12345), "unknown") == 0, "name of no status");
  for (dtype = 1; dtype <= mc_dtype_count(); ++dtype) {
    expect(mc_dtype_name(dtype)[0] != '\0', "every dtype has a name");
    expect(mc_dtype_bits(dtype) > 0, "every dtype has a size");
  }
  expect(mc_version()[0] != '\0', "version");
}

static void check_refusals(void) {
  mc_client* client = NULL;
  mc_client_options options = {0};
  char* path = NULL;
  options.struct_size = sizeof options;
  options.socket_path = "/nonexistent/socket";
  options.autostart = MC_AUTOSTART_NEVER;
  expect(mc_client_connect(&options, &client) == MC_UNAVAILABLE, "nobody listens");
  expect(client == NULL, "out is untouched after a failure");
  expect(strstr(mc_last_error(), "/nonexistent/socket") != NULL, "the message names the socket");
  expect(mc_last_errno() != 0, "errno is kept");
  options.struct_size = 0;
  expect(mc_client_connect(&options, &client) == MC_INVALID_ARGUMENT, "struct_size is required");
  options.struct_size = sizeof options;
  options.timeout_ms = -1;
  expect(mc_client_connect(&options, &client) == MC_INVALID_ARGUMENT, "negative timeout");
  expect(mc_default_socket_path(&path) == MC_OK && path[0] == '/', "default socket path");
  mc_free(path);
  mc_client_close(NULL);
  mc_model_close(NULL);
}

static void check_model(const char* path) {
  mc_client* client = NULL;
  mc_model* model = NULL;
  mc_model* same = NULL;
  mc_info info = {0};
  mc_tensor tensor = {0};
  char* reply = NULL;
  uint64_t i;
  info.struct_size = sizeof info;
  tensor.struct_size = sizeof tensor;
  expect(mc_client_connect(NULL, &client) == MC_OK, "connect");
  expect(mc_model_open(client, &path, 1, NULL, &model) == MC_OK, "open");
  if (model == NULL) {
    mc_client_close(client);
    return;
  }
  same = mc_model_retain(model);
  mc_model_close(model);
  expect(mc_model_info(same, &info) == MC_OK && strlen(info.model_id) == 32, "info");
  for (i = 0; i < mc_model_tensor_count(same); ++i) {
    expect(mc_model_tensor_at(same, i, &tensor) == MC_OK, "tensor by number");
    expect(mc_model_tensor_by_name(same, tensor.name, &tensor) == MC_OK, "tensor by name");
    expect(tensor.index == i, "the same tensor");
  }
  expect(mc_call(client, "status", NULL, &reply) == MC_OK && strstr(reply, "daemon_pid") != NULL,
         "status");
  mc_free(reply);
  mc_client_close(client);
  mc_model_close(same);
}

int main(int argc, char** argv) {
  check_names();
  check_refusals();
  if (argc > 1) {
    check_model(argv[1]);
  }
  if (failures == 0) {
    puts("c_test: all passed");
  }
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
