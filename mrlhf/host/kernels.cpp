// The functions of this folder but those of packed_attention.cpp, with which they form one library.
//
// mrlhf/host/kernels.py calls them by these names, with the arguments of each in order. Sums are
// float32 whatever the storage type is. With `threads` of 1 no team of threads is started.

#include "drawing.h"
#include "paged_attention.h"
#include "products.h"
#include "rows.h"

extern "C" {
EXPORT(rms_norm, add_rms_norm)
EXPORT(rms_norm_backward, rms_norm_backward)
EXPORT(gated, gated)
EXPORT(gated_backward, gated_backward)
EXPORT(rotate_store, paged::rotate_store)
EXPORT(attend_paged, paged::attend)
EXPORT(logit_blocks, logit_blocks)
EXPORT(draw, draw)

void* multiply_float32 = (void*)products::multiply;
void* mixture_of_float32_float32 = (void*)products::mixture<float, float>;
void* mixture_of_bfloat16_float32 = (void*)products::mixture<float, bfloat16>;
void* mixture_of_bfloat16_bfloat16 = (void*)products::mixture<bfloat16, bfloat16>;
int64_t panel_columns = products::kPanel;
}
