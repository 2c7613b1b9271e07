#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_copy(nb::module_&) {}
