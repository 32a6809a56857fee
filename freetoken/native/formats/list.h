// The weight formats, in the order of their indices. Append only: layers name them by index.
#define FT_FORMATS(X) \
  X(bf16) X(f16) X(f32) X(q8_0) X(fp8_block) X(mxfp4) X(nvfp4) X(q4_k) \
  X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q5_k) X(q6_k)
