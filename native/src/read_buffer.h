// Any contiguous readable buffer of Python's: bytes, memoryview, a message frame, an array.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

class ReadBuffer {
  public:
    explicit ReadBuffer(nanobind::handle from) {
        if (PyObject_GetBuffer(from.ptr(), &view_, PyBUF_SIMPLE) != 0) {
            throw nanobind::python_error();
        }
    }
    ReadBuffer(const ReadBuffer&) = delete;
    ReadBuffer& operator=(const ReadBuffer&) = delete;
    ~ReadBuffer() { PyBuffer_Release(&view_); }
    const std::byte* data() const { return static_cast<const std::byte*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

  private:
    Py_buffer view_;
};
