// The weight formats, in the order of their indices. Append only: layers name them by index. P(name) are those
// without int8 activations.
#define FT_FORMATS_OF(X, P) \
  P(bf16) P(f16) P(f32) X(q8_0) P(fp8_block) X(mxfp4) X(nvfp4) X(q4_k) \
  X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q5_k) X(q6_k) \
  P(fp8_channel) P(fp8_tensor) X(int4_g32) X(int4_g64) X(int4_g128) X(int4_zp_g32) X(int4_zp_g64) X(int4_zp_g128) \
  X(iq4_nl) X(iq4_xs) X(q2_k) X(q3_k) P(iq3_s) P(iq3_xxs)
#define FT_FORMATS(X) FT_FORMATS_OF(X, X)
