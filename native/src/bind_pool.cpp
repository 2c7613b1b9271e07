#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_pool(nb::module_&) {}
