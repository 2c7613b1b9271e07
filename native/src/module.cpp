#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_pool(nb::module_& m);
void bind_copy(nb::module_& m);
void bind_watch(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_observe(nb::module_& m);

NB_MODULE(_native, m) {
    bind_pool(m);
    bind_copy(m);
    bind_watch(m);
    bind_memory(m);
    bind_observe(m);
}
