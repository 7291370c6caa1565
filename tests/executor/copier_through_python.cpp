// The thread that copies, which makes its system calls through Python's: what tests put in their places there fails here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

namespace {

PyObject* called(const char* module, const char* name, PyObject* arguments) {
  PyObject* imported = PyImport_ImportModule(module);
  PyObject* function = imported == nullptr ? nullptr : PyObject_GetAttrString(imported, name);
  PyObject* result = function == nullptr || arguments == nullptr ? nullptr : PyObject_CallObject(function, arguments);
  Py_XDECREF(imported);
  Py_XDECREF(function);
  Py_XDECREF(arguments);
  return result;
}

// Takes what Python has raised, and returns its number.
int taken_error() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* number = value == nullptr ? nullptr : PyObject_GetAttrString(value, "errno");
  const long code = number == nullptr ? EIO : PyLong_AsLong(number);
  PyErr_Clear();
  Py_XDECREF(number);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return static_cast<int>(code);
}

ssize_t moved(PyObject* result) {
  const ssize_t count = result == nullptr ? -1 : PyLong_AsSsize_t(result);
  const int code = count < 0 ? taken_error() : 0;
  Py_XDECREF(result);
  errno = code;
  return count;
}

ssize_t pwrite_of_python(int descriptor, const void* start, size_t size, off_t offset) {
  const PyGILState_STATE state = PyGILState_Ensure();
  auto* memory = static_cast<char*>(const_cast<void*>(start));
  PyObject* view = PyMemoryView_FromMemory(memory, static_cast<Py_ssize_t>(size), PyBUF_WRITE);
  const ssize_t count = moved(called("os", "pwrite", Py_BuildValue("(iNL)", descriptor, view, static_cast<long long>(offset))));
  const int code = errno;
  PyGILState_Release(state);
  errno = code;
  return count;
}

ssize_t pread_of_python(int descriptor, void* start, size_t size, off_t offset) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* view = PyMemoryView_FromMemory(static_cast<char*>(start), static_cast<Py_ssize_t>(size), PyBUF_WRITE);
  const ssize_t count =
      moved(called("os", "preadv", Py_BuildValue("(i[N]L)", descriptor, view, static_cast<long long>(offset))));
  const int code = errno;
  PyGILState_Release(state);
  errno = code;
  return count;
}

// Only whether there is memory is asked in Python; the caller holds the interpreter's lock.
void* mmap_of_python(void* address, size_t size, int protection, int flags, int descriptor, off_t offset) {
  PyObject* made = called("mmap", "mmap", Py_BuildValue("(in)", -1, static_cast<Py_ssize_t>(size)));
  if (made == nullptr) return PyErr_Clear(), MAP_FAILED;
  Py_DECREF(made);
  return mmap(address, size, protection, flags, descriptor, offset);
}

}  // namespace

#define pwrite pwrite_of_python
#define pread pread_of_python
#define mmap mmap_of_python
#include "copier.cpp"
