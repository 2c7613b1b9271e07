// What the copy kernel's source needs to be compiled for this processor, and a launch of it.
// Compiled once per width, with VEC and WIDTH defined and the source after this file.
#include <cstring>

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Place {
    unsigned x;
};
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;
extern "C" unsigned long long fake_stores;  // bytes, of all launches
extern "C" int fake_misaligned;             // this processor takes such an address, a GPU does not
#define __global__
#define __launch_bounds__(n)
template <class T>
static void check(const T* at) {
    fake_misaligned |= reinterpret_cast<unsigned long long>(at) % sizeof(T) != 0;
}
template <class T>
static T __ldcs(const T* at) {
    check(at);
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}
template <class T>
static void __stcs(T* at, T value) {
    check(at);
    memcpy(at, &value, sizeof value);
    fake_stores += sizeof(T);
}
#define NAMED(name, width) name##width
#define OF_WIDTH(name, width) NAMED(name, width)
#define kv_move OF_WIDTH(kv_move_, WIDTH)
