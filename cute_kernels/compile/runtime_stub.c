/* An exported kernel reports CUDA errors through two functions of the DSL's 43 MB runtime library.
   Defined here on top of TVM-FFI, they let a host load the kernel without the DSL. */
#include <stdio.h>

int TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

int CuteDSLRT_TVMFFISetRaisedCudaError(void *handle, int code) {
  char text[64];
  (void)handle;
  snprintf(text, sizeof text, "CUDA error %d", code);
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
  return -1;
}

int CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void *handle, int code) {
  return CuteDSLRT_TVMFFISetRaisedCudaError(handle, code);
}
