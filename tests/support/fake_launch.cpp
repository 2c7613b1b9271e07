// A launch: every thread of every block in turn, with the arguments as the driver takes them.
extern "C" int OF_WIDTH(fake_launch_, WIDTH)(unsigned blocks, unsigned threads, void** a) {
    using Table = const long long*;
    fake_misaligned = 0;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            kv_move(*(unsigned long long*)a[0], *(unsigned long long*)a[1], *(Table*)a[2],
                    *(Table*)a[3], *(Table*)a[4], *(Table*)a[5], *(long long*)a[6], *(int*)a[7],
                    *(int*)a[8], *(int*)a[9], *(int*)a[10]);
    return fake_misaligned ? 716 : 0;
}
