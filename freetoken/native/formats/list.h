// The weight formats, in the order of their indices. Append only: layers name them by index.
#define FT_FORMATS(X) \
  X(bf16) X(f16) X(f32) X(q8_0) X(fp8_block) X(mxfp4) X(nvfp4) X(q4_k) \
  X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q5_k) X(q6_k) \
  X(fp8_channel) X(fp8_tensor) X(int4_g32) X(int4_g64) X(int4_g128) X(int4_zp_g32) X(int4_zp_g64) X(int4_zp_g128) \
  X(iq4_nl) X(iq4_xs) X(q2_k) X(q3_k) X(iq3_s) X(iq3_xxs)
