/* Stands in for NVRTC and cuBLASLt of CUDA MAJOR.4: states its version and the architecture 9.0; everything else fails. */
int nvrtcVersion(int* major, int* minor) { *major = MAJOR; *minor = 4; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 1; return 0; }
int nvrtcGetSupportedArchs(int* architectures) { *architectures = 90; return 0; }
unsigned long cublasLtGetVersion(void) { return 10000ul * MAJOR + 400; }
#define FAILS(name) int name(void) { return 1; }
FAILS(nvrtcCreateProgram)
FAILS(nvrtcCompileProgram)
FAILS(nvrtcGetProgramLogSize)
FAILS(nvrtcGetProgramLog)
FAILS(nvrtcGetCUBINSize)
FAILS(nvrtcGetCUBIN)
FAILS(nvrtcGetPTXSize)
FAILS(nvrtcGetPTX)
FAILS(nvrtcDestroyProgram)
FAILS(cublasLtCreate)
FAILS(cublasLtMatrixLayoutCreate)
FAILS(cublasLtMatrixLayoutDestroy)
FAILS(cublasLtMatrixLayoutSetAttribute)
FAILS(cublasLtMatmulAlgoCheck)
FAILS(cublasLtMatmulDescCreate)
FAILS(cublasLtMatmulDescDestroy)
FAILS(cublasLtMatmulDescSetAttribute)
FAILS(cublasLtMatmulPreferenceCreate)
FAILS(cublasLtMatmulPreferenceSetAttribute)
FAILS(cublasLtMatmulPreferenceDestroy)
FAILS(cublasLtMatmulAlgoGetHeuristic)
FAILS(cublasLtMatmul)
