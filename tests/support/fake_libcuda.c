// A driver library that records every call and fails the one that a test names. One device, one
// allocation of a kind that the test chooses; contexts are per thread, as the driver's.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))

static struct {
  uint64_t base;
  size_t bytes;
  int legacy, mempool;
  uint64_t handle_types;
  char calls[4096];
  char failing[64];
  int code;
} state;
static _Thread_local void *current;
static int context;

API void fake_reset(uint64_t base, size_t bytes, int legacy, int mempool, uint64_t handle_types) {
  memset(&state, 0, sizeof state);
  state.base = base, state.bytes = bytes, state.legacy = legacy, state.mempool = mempool;
  state.handle_types = handle_types;
  current = NULL;
}
API void fake_fail(const char *name, int code) {
  strncpy(state.failing, name, sizeof state.failing - 1);
  state.code = code;
}
API void fake_bind(void) { current = &context; }
API int fake_bound(void) { return current != NULL; }
API const char *fake_calls(void) { return state.calls; }

static int begin(const char *name, int needs_context) {
  strncat(state.calls, name, sizeof state.calls - strlen(state.calls) - 2);
  strcat(state.calls, " ");
  if (strcmp(name, state.failing) == 0) return state.code;
  return needs_context && current == NULL ? 201 : 0;
}
static int inside(uint64_t at) { return at >= state.base && at < state.base + state.bytes; }

API int cuDeviceGet(int *device, int ordinal) {
  int code = begin("cuDeviceGet", 0);
  if (code == 0) *device = 7 + ordinal;  // no number that anybody could guess
  return code;
}
API int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  int code = begin("cuDeviceGetUuid_v2", 0);
  for (int i = 0; code == 0 && i < 16; ++i) uuid[i] = i % 4 ? device + i : 0;  // with zero bytes
  return code;
}
API int cuCtxGetCurrent(void **out) {
  int code = begin("cuCtxGetCurrent", 0);
  if (code == 0) *out = current;
  return code;
}
API int cuDevicePrimaryCtxRetain(void **out, int device) {
  int code = begin("cuDevicePrimaryCtxRetain", 0);
  if (code == 0 && device < 7) code = 101;
  if (code == 0) *out = &context;
  return code;
}
API int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  return begin("cuDevicePrimaryCtxRelease_v2", 0);
}
API int cuCtxSetCurrent(void *wanted) {
  int code = begin("cuCtxSetCurrent", 0);
  if (code == 0) current = wanted;
  return code;
}
API int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t at) {
  int code = begin("cuMemGetAddressRange_v2", 1);
  if (code == 0 && !inside(at)) code = 1;
  if (code == 0) *base = state.base, *bytes = state.bytes;
  return code;
}
API int cuPointerGetAttribute(void *out, int attribute, uint64_t at) {
  int code = begin("cuPointerGetAttribute", 1);
  if (code != 0 || !inside(at)) return code ? code : 1;
  switch (attribute) {
    case 7: *(uint64_t *)out = 0x1122334455667788u; return 0;
    case 10: *(int *)out = state.legacy; return 0;  // an int, as the driver writes it
    case 14: *(uint64_t *)out = state.handle_types; return 0;
    case 17: *(void **)out = state.mempool ? &context : NULL; return 0;
    default: return 1;
  }
}
API int cuIpcGetMemHandle(unsigned char *handle, uint64_t at) {
  int code = begin("cuIpcGetMemHandle", 1);
  if (code == 0 && (at != state.base || !state.legacy)) code = 1;  // the base, and nothing else
  for (int i = 0; code == 0 && i < 64; ++i) handle[i] = i;
  return code;
}
