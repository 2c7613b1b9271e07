// What the copy kernel's source needs to be compiled for this processor, and a launch of it.
// Compiled once per width, with VEC and WIDTH defined and the source after this file.
#include <cstring>

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct Place {
    unsigned x;
};
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;
extern "C" unsigned long long fake_stores;  // bytes, of all launches
#define __global__
#define __launch_bounds__(n)
template <class T>
static T __ldcs(const T* at) {
    return *at;
}
template <class T>
static void __stcs(T* at, T value) {
    *at = value;
    fake_stores += sizeof(T);
}
#define NAMED(name, width) name##width
#define OF_WIDTH(name, width) NAMED(name, width)
#define kv_move OF_WIDTH(kv_move_, WIDTH)
