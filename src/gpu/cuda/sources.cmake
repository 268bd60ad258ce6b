# The CUDA device's sources, for the device itself and for the emulator of the tests. cublaslt.cc,
# which loads the library, is the device's alone.
set(STRATA_CUDA_KERNELS
  adam.cu
  attention_backward.cu
  attention_forward.cu
  cross_entropy.cu
  elementwise.cu
  embedding.cu
  finish_gradient.cu
  rms_norm.cu
  rotary.cu
  swiglu.cu)
set(STRATA_CUDA_SOURCES
  cuda_device.cc
  cuda_error.cc
  cuda_operators.cc
  cuda_stream.cc
  matmul.cc
  pinned_memory.cc
  scratch.cc)
list(TRANSFORM STRATA_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM STRATA_CUDA_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
