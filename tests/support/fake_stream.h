// The fake driver's streams and events, included by fake_libcuda.c. All streams are one. What is
// put on it runs at once; or, in a test that wants to see who does not wait (fake_lazily), when
// somebody waits for it and not before.
enum { EVENTS = 256, NOT_READY = 600 };
typedef int (*Work)(void* what);
typedef struct {
    Work run;
    void* what;
} Queued;

static Queued* queue;
static size_t queue_room, queue_end, queue_ran;
static size_t event_at[EVENTS];  // how far the stream was at an event's last record
static int event_there[EVENTS];  // and its flags, beside bit 8
static int lazy;

static int run_until(size_t end) {
    int first = OK;
    for (; queue_ran < end; ++queue_ran) {
        int rc = queue[queue_ran].run(queue[queue_ran].what);
        first = first ? first : rc;
        free(queue[queue_ran].what);
    }
    return first;
}
void fake_lazily(int wanted) {
    ONE_CALL;
    for (; queue_ran < queue_end; ++queue_ran) free(queue[queue_ran].what);
    queue_end = queue_ran = 0;
    memset(event_at, 0, sizeof event_at);
    lazy = wanted;
}
int fake_waiting(void) {
    ONE_CALL;
    return (int)(queue_end - queue_ran);
}
// `what` is copied: nobody has to keep it.
static int put(Work run, const void* what, size_t bytes) {
    if (!lazy) return run((void*)what);
    if (queue_end == queue_room) {
        queue_room = queue_room ? 2 * queue_room : 1024;
        queue = realloc(queue, queue_room * sizeof *queue);
    }
    queue[queue_end] = (Queued){run, malloc(bytes)};
    memcpy(queue[queue_end++].what, what, bytes);
    return OK;
}

int cuStreamCreate(uintptr_t* out, unsigned flags) {
    ENTER;
    *out = 7;
    return context && flags == 1 ? OK : INVALID_CONTEXT;
}
int cuStreamDestroy_v2(uintptr_t stream) {
    ENTER;
    return stream == 7 ? OK : INVALID_VALUE;
}
int cuStreamSynchronize(uintptr_t stream) {
    ENTER;
    return stream == 7 ? run_until(queue_end) : INVALID_VALUE;
}

static size_t* event_of(uintptr_t event) {
    return event && event < EVENTS && event_there[event] ? &event_at[event] : NULL;
}
static int new_event(uintptr_t* out, unsigned flags) {
    for (*out = 1; *out < EVENTS; ++*out)
        if (!event_there[*out]) {
            event_there[*out] = 256 | flags;
            event_at[*out] = 0;
            return OK;
        }
    return NO_MEMORY;
}
int cuEventCreate(uintptr_t* out, unsigned flags) {
    ENTER;
    return context && flags & 2 && flags < 8 ? new_event(out, flags) : INVALID_VALUE;
}
int cuEventRecord(uintptr_t event, uintptr_t stream) {
    ENTER;
    size_t* at = event_of(event);
    if (!at || stream != 7) return INVALID_VALUE;
    *at = queue_end;
    return OK;
}
int cuEventQuery(uintptr_t event) {
    ENTER;
    size_t* at = event_of(event);
    return !at ? INVALID_VALUE : *at > queue_ran ? NOT_READY : OK;
}
// The test of another process holds its copies while this file is there; another says that it does.
static void hold(void) {
    const char* path = getenv("FAKE_CUDA_HOLD");
    if (!path || access(path, F_OK)) return;
    char held[256];
    snprintf(held, sizeof held, "%s.held", path);
    close(open(held, O_CREAT | O_WRONLY, 0600));
    while (!access(path, F_OK)) usleep(1000);
}
int cuEventSynchronize(uintptr_t event) {
    hold();  // other calls go on meanwhile
    ENTER;
    size_t* at = event_of(event);
    // The real one waits in a loop for an event without the flag, and takes a processor.
    return at && event_there[event] & 1 ? run_until(*at) : INVALID_VALUE;
}
int cuEventDestroy_v2(uintptr_t event) {
    ENTER;
    if (!event_of(event)) return INVALID_VALUE;
    event_there[event] = 0;
    return OK;
}
