/* A stand-in for libdfkv with its version 2 interface: what the adapter calls, and the documented
 * ways in which the real one surprises. Written from a description of that interface.
 *
 * Values are files in the folder "store" beside this library, so that processes share them. Files
 * there with these names make it misbehave: "down" (every peer fails at once), "hung" (calls block
 * until it is gone), "old" (it says to be version 1.39.0), "rdma" (its transport). "mds" holds the
 * ENDPOINTS/GROUP under which an MDS knows a ring.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { VALUE_MAX = 64 << 20, SEGMENTS_MAX = 29, KEY_MAX = 64, COOLDOWN_S = 2 };

typedef struct {
    uint32_t struct_size, abi_version;
    const char *members;
    const void *key_namespace;
    uint64_t key_namespace_len, batch_concurrency;
    const char *mds_endpoints, *mds_group;
    int32_t mds_poll_ms;
    uint32_t flags;
    const char *client_id, *client_info;
    int32_t client_heartbeat_ms;
    uint32_t reserved0;
} options_v2;

typedef struct {
    int has_ring;
    double bad_until; /* of the one peer there is */
    uint64_t io_errors, skips;
} client;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void path_of(char *out, const char *name) {
    Dl_info info;
    dladdr((void *)path_of, &info);
    const char *slash = strrchr(info.dli_fname, '/');
    sprintf(out, "%.*s/store/%s", (int)(slash - info.dli_fname), info.dli_fname, name);
}

static int said(const char *name) {
    char path[4096];
    path_of(path, name);
    return access(path, F_OK) == 0;
}

/* One attempt to reach the peer, as every operation begins. A failure cools it down for this
 * handle: what follows fails without an attempt, also when the peer is back. */
static int reach(client *c) {
    if (!c->has_ring) {
        return 0;
    }
    for (int i = 0; said("hung") && i < 2000; ++i) {
        usleep(10000);
    }
    if (now_s() < c->bad_until) {
        ++c->skips;
        return 0;
    }
    if (said("down")) {
        ++c->io_errors;
        c->bad_until = now_s() + COOLDOWN_S;
        return 0;
    }
    return 1;
}

static int name_key(char *out, const void *key, uint64_t len) {
    if (key == NULL || len == 0 || len > KEY_MAX) {
        return 0;
    }
    char hex[2 * KEY_MAX + 1] = "";
    for (uint64_t i = 0; i < len; ++i) {
        sprintf(hex + 2 * i, "%02x", ((const uint8_t *)key)[i]);
    }
    path_of(out, hex);
    return 1;
}

const char *dfkv_version(void) { return said("old") ? "1.39.0" : "2.7.0"; }

/* Members, or an MDS that is asked for the group it knows. */
static int has_ring(const options_v2 *o) {
    if (o->members != NULL && *o->members != 0) {
        return 1;
    }
    if (o->mds_endpoints == NULL || o->mds_group == NULL || o->mds_poll_ms <= 0) {
        return 0;
    }
    char path[4096], asked[1024], known[1024] = "";
    path_of(path, "mds");
    snprintf(asked, sizeof asked, "%s/%s", o->mds_endpoints, o->mds_group);
    int fd = open(path, O_RDONLY);
    ssize_t count = fd < 0 ? -1 : read(fd, known, sizeof known - 1);
    close(fd);
    return count > 0 && strcmp(asked, known) == 0;
}

void *dfkv_open_v2(const options_v2 *o) {
    if (o->struct_size < sizeof *o || o->abi_version != 2 || o->key_namespace_len == 0 ||
        o->reserved0 != 0 || (o->flags & ~1u) != 0) {
        return NULL;
    }
    client *c = calloc(1, sizeof(client));
    c->has_ring = has_ring(o);
    return c;
}

void dfkv_close(void *h) { free(h); }
uint32_t dfkv_max_sg_segs(void *h) { return h == NULL ? 0 : SEGMENTS_MAX; }
const char *dfkv_transport_mode(void *h) { return h != NULL && said("rdma") ? "rdma" : "tcp"; }

int dfkv_register_memory(void *h, void *base, uint64_t size) {
    return h == NULL || base == NULL || size == 0 ? -1 : 0;
}

uint64_t dfkv_stats_snapshot(void *h, char *buffer, uint64_t cap) {
    client *c = h;
    return snprintf(buffer, cap,
                    "dfkv_client_io_errors_total %lu\ndfkv_client_unhealthy_skips_total %lu\n",
                    (unsigned long)c->io_errors, (unsigned long)c->skips);
}

int dfkv_batch_exist(void *h, const void **keys, const uint64_t *lens, int n, int *out) {
    for (int i = 0; i < n; ++i) {
        char path[4096];
        out[i] = name_key(path, keys[i], lens[i]) && reach(h) && access(path, F_OK) == 0;
    }
    return 0;
}

int dfkv_batch_remove(void *h, const void **keys, const uint64_t *lens, int n, int *out) {
    for (int i = 0; i < n; ++i) {
        char path[4096];
        out[i] = name_key(path, keys[i], lens[i]) && reach(h);
        if (out[i]) {
            unlink(path); /* 1 also when it was absent */
        }
    }
    return 0;
}

static int put_one(client *c, const char *path, void **ptrs, const uint64_t *sizes, int num) {
    uint64_t total = 0;
    for (int s = 0; s < num; ++s) {
        total += sizes[s];
    }
    if (num > SEGMENTS_MAX || total == 0 || !reach(c)) {
        return 0;
    }
    if (total > VALUE_MAX) { /* the server drops the connection: an innocent call fails next */
        ++c->io_errors;
        c->bad_until = now_s() + COOLDOWN_S;
        return 0;
    }
    if (access(path, F_OK) == 0) {
        return 1; /* write-once: success, and the old bytes stay */
    }
    char temporary[4200];
    sprintf(temporary, "%s.%d.%p", path, getpid(), (void *)&total);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (int s = 0; s < num; ++s) {
        for (uint64_t at = 0; at < sizes[s];) {
            at += write(fd, (char *)ptrs[s] + at, sizes[s] - at);
        }
    }
    close(fd);
    rename(temporary, path);
    return 1;
}

int dfkv_batch_put_sg(void *h, const void **keys, const uint64_t *lens, void ***ptrs,
                      uint64_t **sizes, int *num, int n, int *out_ok) {
    for (int i = 0; i < n; ++i) {
        char path[4096];
        out_ok[i] =
            name_key(path, keys[i], lens[i]) && put_one(h, path, ptrs[i], sizes[i], num[i]);
    }
    return 0;
}

static int get_one(client *c, const char *path, void **dsts, const uint64_t *caps, int num,
                   uint64_t *len) {
    *len = 0;
    if (num > SEGMENTS_MAX || !reach(c)) {
        return 0;
    }
    int fd = open(path, O_RDONLY);
    if (fd < 0) {
        return 0;
    }
    uint64_t stored = lseek(fd, 0, SEEK_END), room = 0;
    lseek(fd, 0, SEEK_SET);
    for (int s = 0; s < num; ++s) {
        room += caps[s];
        for (uint64_t at = 0; at < caps[s];) {
            ssize_t got = read(fd, (char *)dsts[s] + at, caps[s] - at);
            if (got <= 0) {
                break;
            }
            at += got;
        }
    }
    close(fd);
    if (stored > room) {
        return 0; /* a miss that has overwritten its destination */
    }
    *len = stored;
    return 1;
}

int dfkv_batch_get_auto_sg(void *h, const void **keys, const uint64_t *lens, void ***dsts,
                           uint64_t **caps, int *num, int n, int *out_hit, uint64_t *out_len) {
    for (int i = 0; i < n; ++i) {
        char path[4096];
        out_hit[i] = name_key(path, keys[i], lens[i]) &&
                     get_one(h, path, dsts[i], caps[i], num[i], &out_len[i]);
    }
    return 0;
}
