// A CUDA driver made of host memory, for tests: it records every call and can fail any of them.
// "Device memory" is a POSIX shared-memory object, so that a handle opens in another process.
// Of the real one's rules it keeps those that are easily broken: a handle is of an allocation's
// base, of no memory with VMM, and never opened by the process that made it; copies touch only
// device memory that is mapped and, of the host, what they are given; virtual memory that was
// imported is mapped into a reservation, wants access before it is touched, and leaves in the
// reverse order.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    NO_MEMORY = 2,
    INVALID_CONTEXT = 201,
    MAP_FAILED_ = 205,
    NOT_REGISTERED = 713
};
enum { RANGES = 256, PINS = 256, LOG_BYTES = 1 << 20 };

typedef struct {
    uint64_t base;
    size_t bytes;
    uint64_t id;
    int device, kind, opened;
    int reserved, no_access, fd;  // of virtual memory that was mapped
    uint64_t types;
    char name[48];
} Range;
typedef struct {
    uint64_t base;
    size_t bytes;
} Pin;
typedef struct {
    unsigned char reserved[64];
} Handle;
typedef struct {
    size_t srcX, srcY;
    int srcType;
    const void* srcHost;
    uint64_t srcDevice;
    void* srcArray;
    size_t srcPitch;
    size_t dstX, dstY;
    int dstType;
    void* dstHost;
    uint64_t dstDevice;
    void* dstArray;
    size_t dstPitch;
    size_t width, height;
} Copy2D;

static Range ranges[RANGES];
static Pin pins[PINS];
static char calls[LOG_BYTES];
static size_t calls_end;
static char failing[64];
static int failing_code, failing_after;
static __thread uintptr_t context;
static uint64_t next_id = 1;

// The test of another process writes "CALL CODE" into a file: with that call its context is lost,
// and from then on every call fails that needs one.
static int lost_by(const char* name) {
    static int code;
    const char* path = getenv("FAKE_CUDA_LOST");
    if (!path || !strncmp(name, "cuDevice", 8) || !strncmp(name, "cuCtx", 5)) return OK;
    if (code) return code;
    char wanted[64] = "";
    int found = 0;
    FILE* file = fopen(path, "r");
    if (!file) return OK;
    if (fscanf(file, "%63s %d", wanted, &found) == 2 && !strcmp(wanted, name)) code = found;
    fclose(file);
    return code;
}
static int enter(const char* name) {
    size_t n = strlen(name);
    if (calls_end + n + 1 < LOG_BYTES) {
        memcpy(calls + calls_end, name, n);
        calls[calls_end + n] = '\n';
        calls_end += n + 1;
    }
    if (failing_code && strcmp(failing, name) == 0) {
        if (failing_after-- <= 0) return failing_code;
    }
    return lost_by(name);
}
// As the real one's, any thread may make these calls: they wait for each other.
static pthread_mutex_t one_call = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int begin(void) { return pthread_mutex_lock(&one_call); }
static void end(int* begun) { *begun = pthread_mutex_unlock(&one_call); }
#define ONE_CALL int begun_ __attribute__((cleanup(end), unused)) = begin()
#define ENTER                      \
    ONE_CALL;                      \
    do {                           \
        int rc_ = enter(__func__); \
        if (rc_) return rc_;       \
    } while (0)

// For tests.
const char* fake_calls(void) {
    calls[calls_end] = 0;
    return calls;
}
void fake_forget(void) { calls_end = 0; }
void fake_fail(const char* name, int code, int after) {
    snprintf(failing, sizeof failing, "%s", name);
    failing_code = code;
    failing_after = after;
}
int fake_pinned(uint64_t at) {
    for (int i = 0; i < PINS; ++i)
        if (pins[i].bytes && at >= pins[i].base && at < pins[i].base + pins[i].bytes) return 1;
    return 0;
}
void fake_unpin_all(void) { memset(pins, 0, sizeof pins); }
// Whether a piece of host memory lies in one registration.
static int in_one_pin(uint64_t at, size_t bytes) {
    for (int i = 0; i < PINS; ++i)
        if (pins[i].bytes && at >= pins[i].base && at + bytes <= pins[i].base + pins[i].bytes)
            return 1;
    return 0;
}
int fake_mapped(void) {
    int n = 0;
    for (int i = 0; i < RANGES; ++i) n += ranges[i].bytes && ranges[i].opened;
    return n;
}
// kind: 0 virtual memory (which `types` of handle it has), 1 cudaMalloc, 2 of a stream-ordered
// pool.
int fake_alloc(uint64_t* out, size_t bytes, int device, int kind, uint64_t types) {
    ONE_CALL;
    for (int i = 0; i < RANGES; ++i) {
        Range* r = &ranges[i];
        if (r->bytes) continue;

        snprintf(r->name, sizeof r->name, "/kvferry-fake-gpu-%d-%llu", getpid(),
                 (unsigned long long)next_id);
        int fd = shm_open(r->name, O_CREAT | O_EXCL | O_RDWR, 0600);
        if (fd < 0 || ftruncate(fd, bytes)) return NO_MEMORY;
        void* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (at == MAP_FAILED) return NO_MEMORY;
        r->base = (uint64_t)at;
        r->bytes = bytes;
        r->id = next_id++;
        r->device = device;
        r->kind = kind;
        r->types = types;
        r->opened = r->reserved = r->no_access = 0;
        *out = r->base;
        return OK;
    }
    return NO_MEMORY;
}
enum { HANDLES = 64 };
static int handles[HANDLES];  // of virtual memory: descriptors of the objects
static int handle_types[HANDLES];
void fake_lazily(int wanted);
void fake_free_all(void) {
    ONE_CALL;
    fake_lazily(0);
    for (int i = 0; i < HANDLES; ++i) {
        if (handles[i] > 0) close(handles[i]);
        handles[i] = 0;
    }
    for (int i = 0; i < RANGES; ++i) {
        if (!ranges[i].bytes) continue;
        if (!ranges[i].opened && !ranges[i].reserved) shm_unlink(ranges[i].name);
        munmap((void*)ranges[i].base, ranges[i].bytes);
        ranges[i].bytes = 0;
    }
}
// A process that ends leaves nothing in /dev/shm; a forked one leaves its parent's alone.
__attribute__((destructor)) static void at_the_end(void) {
    char own[48];
    snprintf(own, sizeof own, "/kvferry-fake-gpu-%d-event", getpid());
    shm_unlink(own);
    *strstr(own, "event") = 0;
    for (int i = 0; i < RANGES; ++i)
        if (ranges[i].bytes && !strncmp(ranges[i].name, own, strlen(own)))
            shm_unlink(ranges[i].name);
}

static Range* find(uint64_t at) {
    for (int i = 0; i < RANGES; ++i)
        if (ranges[i].bytes && at >= ranges[i].base && at < ranges[i].base + ranges[i].bytes)
            return ranges[i].no_access ? NULL : &ranges[i];
    return NULL;
}
static Range* range_at(uint64_t base, size_t bytes) {
    for (int i = 0; i < RANGES; ++i)
        if (ranges[i].bytes && ranges[i].base == base)
            return ranges[i].bytes == bytes ? &ranges[i] : NULL;
    return NULL;
}

static char loading[16];  // how modules are loaded: the real one asks this once, here
const char* fake_loading(void) { return loading; }
int cuInit(unsigned flags) {
    ENTER;
    const char* wanted = getenv("CUDA_MODULE_LOADING");
    snprintf(loading, sizeof loading, "%s", wanted ? wanted : "");
    return flags ? INVALID_VALUE : OK;
}
int cuDriverGetVersion(int* version) {
    ENTER;
    *version = 13000;
    return OK;
}
int cuDeviceGetCount(int* count) {
    ENTER;
    *count = 2;
    return OK;
}
int cuDeviceGet(int* device, int ordinal) {
    ENTER;
    *device = ordinal;
    return ordinal < 2 ? OK : 101;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    ENTER;
    memset(uuid, 0, 16);
    uuid[0] = 'G';
    uuid[5] = (unsigned char)(1 + device);
    uuid[15] = 7;
    return OK;
}
int cuDevicePrimaryCtxRetain(uintptr_t* out, int device) {
    ENTER;
    *out = 100 + device;
    return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER;
    return device < 2 ? OK : 101;
}
int cuCtxSetCurrent(uintptr_t ctx) {
    ENTER;
    context = ctx;
    return OK;
}
int cuCtxGetCurrent(uintptr_t* out) {
    ENTER;
    *out = context;
    return OK;
}

int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t at) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    Range* r = find(at);
    if (!r) return INVALID_VALUE;
    *base = r->base;
    *bytes = r->bytes;
    return OK;
}
int cuPointerGetAttribute(void* out, int attribute, uint64_t at) {
    ENTER;
    Range* r = find(at);
    if (!context) return INVALID_CONTEXT;
    if (!r) return INVALID_VALUE;
    if (attribute == 7)
        *(uint64_t*)out = r->id;
    else if (attribute == 9)
        *(int*)out = r->device;
    else if (attribute == 10)
        *(int*)out = r->kind == 1;
    else if (attribute == 14)
        *(uint64_t*)out = r->types;
    else if (attribute == 17)
        *(uint64_t*)out = r->kind == 2;
    else
        return INVALID_VALUE;
    return OK;
}
int cuIpcGetMemHandle(Handle* handle, uint64_t base) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    Range* r = find(base);
    if (!r || r->base != base || r->kind != 1) return INVALID_VALUE;
    if (r->device != (int)context - 100) return INVALID_CONTEXT;
    memset(handle, 0, sizeof *handle);
    handle->reserved[1] = 1;
    memcpy(handle->reserved + 2, r->name, sizeof r->name);
    return OK;
}
int cuIpcOpenMemHandle_v2(uint64_t* out, Handle handle, unsigned flags) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    if (flags != 1 || handle.reserved[1] != 1) return INVALID_VALUE;
    const char* name = (const char*)handle.reserved + 2;
    char own[48];
    snprintf(own, sizeof own, "/kvferry-fake-gpu-%d-", getpid());
    if (strncmp(name, own, strlen(own)) == 0) return INVALID_CONTEXT;
    for (int i = 0; i < RANGES; ++i)
        if (ranges[i].bytes && strcmp(ranges[i].name, name) == 0) {  // as documented; once it was 208
            ++ranges[i].opened;
            *out = ranges[i].base;
            return OK;
        }
    int fd = shm_open(name, O_RDWR, 0600);
    if (fd < 0) return MAP_FAILED_;
    off_t bytes = lseek(fd, 0, SEEK_END);
    void* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return MAP_FAILED_;
    for (int i = 0; i < RANGES; ++i) {
        Range* r = &ranges[i];
        if (r->bytes) continue;
        memcpy(r->name, name, sizeof r->name);
        r->base = (uint64_t)at;
        r->bytes = bytes;
        r->opened = 1;
        r->reserved = r->no_access = 0;
        r->device = (int)context - 100;
        *out = r->base;
        return OK;
    }
    return NO_MEMORY;
}
int cuIpcCloseMemHandle(uint64_t base) {
    ENTER;
    Range* r = find(base);
    if (!r || r->base != base || !r->opened) return INVALID_VALUE;
    if (r->device != (int)context - 100) return INVALID_CONTEXT;  // as the owning device's alone
    if (--r->opened) return OK;
    munmap((void*)r->base, r->bytes);
    r->bytes = 0;
    return OK;
}

// Virtual memory. A handle is the number of an entry with a descriptor of the object.
enum { GRANULE = 4096, NOT_SUPPORTED = 801, UNKNOWN = 999 };
int fake_handles(void) {
    int n = 0;
    for (int i = 0; i < HANDLES; ++i) n += handles[i] > 0;
    return n;
}
static int keep(uint64_t* out, int fd) {
    for (int i = 0; i < HANDLES; ++i)
        if (!handles[i]) {
            handles[i] = fd;
            handle_types[i] = 0;
            *out = 1 + i;
            return OK;
        }
    return NO_MEMORY;
}
static int* handle_of(uint64_t handle) {
    return handle && handle <= HANDLES && handles[handle - 1] ? &handles[handle - 1] : NULL;
}
int cuMemRetainAllocationHandle(uint64_t* out, void* at) {
    ENTER;
    Range* r = find((uint64_t)at);
    if (!r || r->kind != 0) return INVALID_VALUE;
    return keep(out, r->reserved ? dup(r->fd) : shm_open(r->name, O_RDWR, 0600));
}
typedef struct {
    int type, types, place, device;
} Properties;
int cuMemGetAllocationGranularity(size_t* out, const Properties* wanted, int option) {
    ENTER;
    *out = GRANULE;
    return wanted->type == 1 && wanted->place == 1 && !option ? OK : INVALID_VALUE;
}
int cuMemCreate(uint64_t* out, size_t bytes, const Properties* wanted, uint64_t flags) {
    ENTER;
    if (wanted->types & 8) return 800;  // no IMEX channel
    if (wanted->type != 1 || bytes % GRANULE || flags) return INVALID_VALUE;
    char name[48];
    snprintf(name, sizeof name, "/kvferry-fake-gpu-%d-v%llu", getpid(),
             (unsigned long long)next_id++);
    int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, bytes)) return NO_MEMORY;
    shm_unlink(name);
    int rc = keep(out, fd);
    if (!rc) handle_types[*out - 1] = wanted->types;
    return rc;
}
int cuMemExportToShareableHandle(int* out, uint64_t handle, int type, uint64_t flags) {
    ENTER;
    int* fd = handle_of(handle);
    if (!fd || flags) return INVALID_VALUE;
    if (type != 1) return NOT_SUPPORTED;
    *out = dup(*fd);
    return OK;
}
int cuMemImportFromShareableHandle(uint64_t* out, void* fd, int type) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    char link[48], name[64] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", (int)(uintptr_t)fd);
    if (type != 1) return NOT_SUPPORTED;
    // The number of another process's descriptor means nothing, or something else, here.
    if (readlink(link, name, sizeof name - 1) < 0 || !strstr(name, "kvferry-fake-gpu")) return UNKNOWN;
    return keep(out, dup((int)(uintptr_t)fd));
}
int cuMemRelease(uint64_t handle) {
    ENTER;
    int* fd = handle_of(handle);
    if (!fd) return INVALID_VALUE;
    close(*fd);
    *fd = 0;
    return OK;
}
int cuMemAddressReserve(uint64_t* out, size_t bytes, size_t align, uint64_t at, uint64_t flags) {
    ENTER;
    if (!bytes || bytes % GRANULE || align || at || flags) return INVALID_VALUE;
    for (int i = 0; i < RANGES; ++i) {
        Range* r = &ranges[i];
        if (r->bytes) continue;
        void* place = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (place == MAP_FAILED) return NO_MEMORY;
        *r = (Range){.base = (uint64_t)place, .bytes = bytes, .reserved = 1, .no_access = 1};
        *out = r->base;
        return OK;
    }
    return NO_MEMORY;
}
int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    ENTER;
    Range* r = range_at(at, bytes);
    int* fd = handle_of(handle);
    if (!r || !r->reserved || r->opened || !fd || offset || flags) return INVALID_VALUE;
    if ((off_t)bytes != lseek(*fd, 0, SEEK_END)) return INVALID_VALUE;
    if (mmap((void*)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, *fd, 0) == MAP_FAILED)
        return MAP_FAILED_;
    r->opened = 1;
    r->fd = dup(*fd);
    r->id = next_id++;
    r->types = handle_types[handle - 1];
    return OK;
}
int cuMemSetAccess(uint64_t at, size_t bytes, const int* access, size_t count) {
    ENTER;
    Range* r = range_at(at, bytes);
    if (!r || !r->opened || count != 1 || access[0] != 1 || access[2] != 3) return INVALID_VALUE;
    r->device = access[1];
    r->no_access = 0;
    return mprotect((void*)at, bytes, PROT_READ | PROT_WRITE) ? UNKNOWN : OK;
}
int cuMemUnmap(uint64_t at, size_t bytes) {
    ENTER;
    Range* r = range_at(at, bytes);
    if (!r || !r->reserved || !r->opened) return INVALID_VALUE;
    mmap((void*)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    close(r->fd);
    r->opened = 0;
    r->no_access = 1;
    return OK;
}
int cuMemAddressFree(uint64_t at, size_t bytes) {
    ENTER;
    Range* r = range_at(at, bytes);
    if (!r || !r->reserved || r->opened) return INVALID_VALUE;
    munmap((void*)at, bytes);
    r->bytes = 0;
    return OK;
}

int cuMemHostRegister_v2(uint64_t at, size_t bytes, unsigned flags) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    if (flags != 3 || at % 4096) return INVALID_VALUE;
    for (int i = 0; i < PINS; ++i) {
        if (pins[i].bytes) continue;
        pins[i].base = at;
        pins[i].bytes = bytes;
        return OK;
    }
    return NO_MEMORY;
}
int cuMemHostUnregister(uint64_t at) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    for (int i = 0; i < PINS; ++i)
        if (pins[i].bytes && pins[i].base == at) {
            pins[i].bytes = 0;
            return OK;
        }
    return NOT_REGISTERED;
}
int cuMemHostGetDevicePointer_v2(uint64_t* out, uint64_t at, unsigned flags) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    if (!fake_pinned(at) || flags) return INVALID_VALUE;
    *out = at;
    return OK;
}

#include "fake_stream.h"
static int words_on;  // the context whose stream wrote the last word
int fake_words_on(void) { return words_on; }
typedef struct {
    uint64_t at, value;
} Word;
static int store(void* what) {
    Word* w = what;
    __atomic_store_n((uint64_t*)w->at, w->value, __ATOMIC_RELEASE);
    return OK;
}
int cuStreamWriteValue64_v2(uintptr_t stream, uint64_t at, uint64_t value, unsigned flags) {
    ENTER;
    (void)stream;
    if (!context) return INVALID_CONTEXT;
    words_on = (int)context - 100;
    if (!fake_pinned(at) || flags) return INVALID_VALUE;
    return put(store, &(Word){at, value}, sizeof(Word));
}
// The default stream, in either of its kinds (0, 1, 2), waits for others: nobody is to use it.
static int on_stream(uintptr_t stream) { return context && stream == 7; }
static int move_2d(void* what) {
    const Copy2D* c = what;
    int save = c->srcType == 2;
    char* device = (char*)(save ? c->srcDevice : c->dstDevice);
    char* host = save ? c->dstHost : (char*)c->srcHost;
    for (size_t y = 0; y < c->height; ++y) {
        char* d = device + y * (save ? c->srcPitch : c->dstPitch);
        char* h = host + y * (save ? c->dstPitch : c->srcPitch);
        memcpy(save ? h : d, save ? d : h, c->width);
    }
    return OK;
}
int cuMemcpy2DAsync_v2(const Copy2D* c, uintptr_t stream) {
    ENTER;
    if (!on_stream(stream)) return INVALID_CONTEXT;
    int save = c->srcType == 2 && c->dstType == 1, load = c->srcType == 1 && c->dstType == 2;
    if (!save && !load) return INVALID_VALUE;
    uint64_t device = save ? c->srcDevice : c->dstDevice;
    size_t pitch = save ? c->srcPitch : c->dstPitch;
    const char* host = save ? c->dstHost : c->srcHost;
    size_t host_pitch = save ? c->dstPitch : c->srcPitch;
    Range* r = find(device);
    size_t reach = (c->height - 1) * pitch + c->width;
    if (!r || device + reach > r->base + r->bytes || c->width > pitch || c->width > host_pitch)
        return INVALID_VALUE;
    if (r->device != (int)context - 100) return INVALID_CONTEXT;
    if (!in_one_pin((uint64_t)host, (c->height - 1) * host_pitch + c->width)) return INVALID_VALUE;
    return put(move_2d, c, sizeof *c);
}

typedef struct {
    void* to;
    const void* from;
    size_t bytes;
} Bytes;
static int move_bytes(void* what) {
    Bytes* b = what;
    memcpy(b->to, b->from, b->bytes);
    return OK;
}
// One piece: exactly one of the two sides is device memory, wholly inside it and on this GPU.
static int piece(uint64_t to, uint64_t from, size_t bytes) {
    Range *a = find(to), *b = find(from), *r = a ? a : b;
    uint64_t device = a ? to : from, host = a ? from : to;
    if (!a == !b || !bytes || device + bytes > r->base + r->bytes) return INVALID_VALUE;
    if (r->device != (int)context - 100) return INVALID_CONTEXT;
    if (!in_one_pin(host, bytes)) return INVALID_VALUE;
    return put(move_bytes, &(Bytes){(void*)to, (void*)from, bytes}, sizeof(Bytes));
}
typedef struct {
    int order, src_type, src_id, dst_type, dst_id;
    unsigned flags;
} CopyAttributes;
static int batches_missing;
void fake_without_batches(int missing) { batches_missing = missing; }
int cuMemcpyBatchAsync(uint64_t* to, uint64_t* from, size_t* sizes, size_t count,
                       CopyAttributes* attributes, size_t* indices, size_t attribute_count,
                       size_t* failed, uintptr_t stream) {
    ENTER;
    if (!on_stream(stream) || !count || count > 4096) return INVALID_VALUE;
    if (attribute_count != 1 || attributes->order != 1 || indices[0]) return INVALID_VALUE;
    for (size_t i = 0; i < count; ++i) {
        int rc = piece(to[i], from[i], sizes[i]);
        *failed = i;
        if (rc) return rc;
    }
    return OK;
}
int cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* status) {
    ENTER;
    (void)flags;
    int known = strcmp(name, "cuMemcpyBatchAsync") == 0 && version == 12080 && !batches_missing;
    *out = known ? (void*)cuMemcpyBatchAsync : NULL;
    *status = !known;
    return OK;
}
int cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    ENTER;
    (void)flags;
    *out = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return NO_MEMORY;
    return cuMemHostRegister_v2((uint64_t)*out, bytes, 3);
}
int cuMemFreeHost(uint64_t at) {
    ENTER;
    for (int i = 0; i < PINS; ++i)
        if (pins[i].bytes && pins[i].base == at) munmap((void*)at, pins[i].bytes);
    return cuMemHostUnregister(at);
}
int cuMemcpyDtoHAsync_v2(uint64_t host, uint64_t at, size_t bytes, uintptr_t stream) {
    ENTER;
    return on_stream(stream) ? piece(host, at, bytes) : INVALID_CONTEXT;
}
// What is not pinned is staged by the driver: it is read before the call returns.
static int move_staged(void* what) {
    Bytes* b = what;
    memcpy(b->to, b + 1, b->bytes);
    return OK;
}
int cuMemcpyHtoDAsync_v2(uint64_t at, const void* host, size_t bytes, uintptr_t stream) {
    ENTER;
    Range* r = find(at);
    if (!on_stream(stream) || !r || at + bytes > r->base + r->bytes) return INVALID_VALUE;
    Bytes b = {(void*)at, host, bytes};
    if (fake_pinned((uint64_t)host)) return put(move_bytes, &b, sizeof b);
    Bytes* staged = malloc(sizeof b + bytes);
    *staged = b;
    memcpy(staged + 1, host, bytes);
    int rc = put(move_staged, staged, sizeof b + bytes);
    free(staged);
    return rc;
}

int cuDeviceGetPCIBusId(char* out, int length, int device) {
    ENTER;
    snprintf(out, length, "0000:FF:%02X.0", device);
    return OK;
}
int cuMemGetInfo_v2(size_t* free_bytes, size_t* bytes) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    *bytes = (size_t)1 << 30;
    *free_bytes = *bytes;
    for (int i = 0; i < RANGES; ++i) *free_bytes -= ranges[i].bytes;
    return OK;
}

// Kernels: the product's own source, compiled for this processor (fake_cuda.py), by its width.
int fake_kernel(int width, unsigned blocks, unsigned threads, void** arguments);
static int kernels;
void fake_with_kernels(int there) { kernels = there; }
int cuDeviceGetAttribute(int* out, int attribute, int device) {
    ENTER;
    if (attribute == 125) {  // CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
        *out = device == 0 || !getenv("FAKE_CUDA_NO_IPC");
        return device < 2 ? OK : 101;
    }
    // NVRTC asks the driver more than this one knows, and crashes: no process compiles for it.
    if (!kernels) return 801;
    *out = attribute == 75 ? 9 : 0;
    return device < 2 ? OK : 101;
}
int cuModuleLoadDataEx(uintptr_t* out, const char* image, unsigned n, void* options, void* values) {
    ENTER;
    (void)n, (void)options, (void)values;
    if (!context) return INVALID_CONTEXT;
    int width = 0;
    if (sscanf(image, "for vectors of %d", &width) != 1) return INVALID_VALUE;
    *out = 1000 + width;
    return OK;
}
int cuModuleGetFunction(uintptr_t* out, uintptr_t module, const char* name) {
    ENTER;
    *out = module;
    return strcmp(name, "kv_move") ? INVALID_VALUE : OK;
}
// kv_move's arguments: seven of eight bytes and four of four, as they are at the launch.
enum { ARGUMENTS = 11, WIDE = 7 };
typedef struct {
    int width;
    unsigned blocks, threads;
    uint64_t arguments[ARGUMENTS];
} Launch;
static int launch(void* what) {
    Launch* l = what;
    void* arguments[ARGUMENTS];
    for (int i = 0; i < ARGUMENTS; ++i) arguments[i] = &l->arguments[i];
    return fake_kernel(l->width, l->blocks, l->threads, arguments);
}
int cuLaunchKernel(uintptr_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, uintptr_t stream, void** arguments,
                   void** extra) {
    ENTER;
    if (!on_stream(stream) || gy * gz * by * bz != 1 || shared || extra) return INVALID_VALUE;
    Launch l = {.width = (int)function - 1000, .blocks = gx, .threads = bx};
    for (int i = 0; i < ARGUMENTS; ++i) memcpy(&l.arguments[i], arguments[i], i < WIDE ? 8 : 4);
    return put(launch, &l, sizeof l);
}

// What only the steps of `make gpu` call. An event that is shared is a file in /dev/shm.
int cuIpcGetEventHandle(Handle* handle, uintptr_t event) {
    ENTER;
    if (!event_of(event)) return INVALID_VALUE;
    snprintf((char*)handle->reserved, sizeof *handle, "/kvferry-fake-gpu-%d-event", getpid());
    int fd = shm_open((char*)handle->reserved, O_CREAT | O_RDWR, 0600);
    if (fd < 0) return MAP_FAILED_;
    close(fd);
    return OK;
}
int cuIpcOpenEventHandle(uintptr_t* out, Handle handle) {
    ENTER;
    int fd = shm_open((char*)handle.reserved, O_RDWR, 0600);
    if (fd < 0) return MAP_FAILED_;
    close(fd);
    return new_event(out, 0);
}
int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    return fake_alloc(out, bytes, (int)context - 100, 1, 0);
}
int cuMemFree_v2(uint64_t at) {
    ENTER;
    if (!context) return INVALID_CONTEXT;
    Range* r = find(at);
    if (!r || r->base != at || r->opened) return INVALID_VALUE;
    shm_unlink(r->name);
    munmap((void*)r->base, r->bytes);
    r->bytes = 0;
    return OK;
}
int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, uintptr_t stream) {
    ENTER;
    (void)stream;
    Range* r = find(at);
    if (!r || at + bytes > r->base + r->bytes) return INVALID_VALUE;
    memset((void*)at, value, bytes);
    return OK;
}
int cuMemcpyDtoH_v2(void* host, uint64_t at, size_t bytes) {
    ENTER;
    Range* r = find(at);
    if (!r || at + bytes > r->base + r->bytes) return INVALID_VALUE;
    memcpy(host, (void*)at, bytes);
    return OK;
}
int cuMemcpyHtoD_v2(uint64_t at, const void* host, size_t bytes) {
    ENTER;
    Range* r = find(at);
    if (!r || at + bytes > r->base + r->bytes) return INVALID_VALUE;
    memcpy((void*)at, host, bytes);
    return OK;
}
int cuCtxSynchronize(void) {
    ENTER;
    return context ? OK : INVALID_CONTEXT;
}
