//! The test of the tests: each fault planted in a kernel makes a test fail.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rayon::prelude::*;

/// A fault that is planted in a file of kernels by replacing every occurrence of a text.
struct Fault {
    file: &'static str,
    what: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn fault(file: &'static str, what: &'static str, from: &'static str, to: &'static str) -> Fault {
    Fault { file, what, from, to }
}

/// Faults of every kind: barriers, waits, masks, bounds, fragments, strides, formulas. Each is listed under the test that must
/// find it.
const FAULTS: &[(&str, &[Fault])] = &[
    (
        "attention_with_shared_prefixes",
        &[
            fault(
                "attention",
                "no barrier after copies have arrived",
                "wait_copies<0>();\n        sync_block();\n        if (keys",
                "wait_copies<0>();\n        if (keys",
            ),
            fault(
                "attention",
                "a stage is written before all have read it",
                "wait_copies<0>();\n        sync_block();\n        if (keys.valid()) fetch(stage ^ 1);",
                "wait_copies<0>();\n        if (keys.valid()) fetch(stage ^ 1);\n        sync_block();",
            ),
            fault("attention", "waits for one group of copies too few", "wait_copies<0>", "wait_copies<1>"),
            fault(
                "attention",
                "the causal mask is off by one",
                "key >= row + i * 16 + e / 2 * 8 + off",
                "key > row + i * 16 + e / 2 * 8 + off",
            ),
            fault(
                "attention",
                "the causal mask of the backward pass is off by one",
                "key >= row + e / 2 * 8 + off",
                "key > row + e / 2 * 8 + off",
            ),
            fault("attention", "no mask on the last keys", "at + ROWS > end ||", "at > end ||"),
            fault(
                "attention",
                "no barrier in a step over queries",
                "wait_copies<0>();\n        sync_block();\n        if (item",
                "wait_copies<0>();\n        if (item",
            ),
            fault(
                "attention",
                "statistics of the wrong stage",
                "stats + stage * 2 * Q",
                "stats + (stage ^ 1) * 2 * Q",
            ),
            fault("attention", "two statistics swapped", "? lse : delta)", "? delta : lse)"),
            fault(
                "attention",
                "the statistics of the step before",
                "stat *= -LOG2E;",
                "stat *= -LOG2E; stat = stats[threadIdx.x];",
            ),
            fault("attention", "a larger maximum reduces no values", "if (decay != 1)", "if (decay == 1)"),
            fault(
                "attention",
                "a larger maximum reduces no sum",
                "fma_(l[i][h], decay, sum)",
                "l[i][h] + sum",
            ),
            fault("attention", "the maximum of half of a row", "top = max_(top, shuffle_xor(top, 2));", ""),
            fault(
                "attention",
                "halves of a fragment of values swapped",
                "mma(acc[i][c / 8], a[i], b[0], b[1]), mma(acc[i][c / 8 + 1], a[i], b[2], b[3])",
                "mma(acc[i][c / 8], a[i], b[0], b[2]), mma(acc[i][c / 8 + 1], a[i], b[1], b[3])",
            ),
            fault(
                "attention",
                "halves of a fragment swapped",
                "mma(acc[c / 8], a, b[0], b[1]);\n            mma(acc[c / 8 + 1], a, b[2], b[3]);",
                "mma(acc[c / 8], a, b[0], b[2]);\n            mma(acc[c / 8 + 1], a, b[1], b[3]);",
            ),
            fault(
                "attention",
                "a barrier in a branch",
                "wait_copies<0>();\n        sync_block();",
                "wait_copies<0>();\n        if (threadIdx.x < 96) sync_block();",
            ),
            fault("attention", "rows behind the end are stored", "if (row + g < end)", ""),
            fault(
                "attention",
                "the gradient is read with another stride",
                "(i64)tile.row0 * sh.out_stride, sh.out_stride, tile",
                "(i64)tile.row0 * sh.stride, sh.stride, tile",
            ),
            fault(
                "attention",
                "the last head's gradient is left out",
                "for (int h = 0; h < group; h++)",
                "for (int h = 0; h < group - 1; h++)",
            ),
            fault("attention", "another head's keys", "kv = head / sh.group", "kv = head % sh.group"),
            fault("attention", "keys before the range have a gradient", "key < now.k0 || ", ""),
            fault(
                "attention",
                "the gradient of queries is not scaled",
                "dq + head * D, acc, sh.scale, sh.scale",
                "dq + head * D, acc, 1, 1",
            ),
            fault("attention", "one transposition too many", "load_matrices<true>", "load_matrices<false>"),
        ],
    ),
    (
        "attention_has_the_same_bits_on_every_card",
        &[
            fault("attention", "the first rows of a warp twice", "lq + i * 16 * LD + c", "lq + c"),
            fault(
                "attention",
                "masks of the first rows",
                "row + i * 16 + e / 2 * 8 + off",
                "row + e / 2 * 8 + off",
            ),
            fault(
                "attention",
                "statistics of the first rows",
                "at = row + i * 16 + 8 * h",
                "at = row + 8 * h",
            ),
            fault(
                "attention",
                "outputs of the first rows",
                "store_rows<D>(out + head * D, acc[i]",
                "store_rows<D>(out + head * D, acc[0]",
            ),
            fault("attention", "weights of the first rows", "= s[i][j], (&n)", "= s[0][j], (&n)"),
            fault(
                "attention",
                "a warp's rows overlap",
                "threadIdx.x / 32 * 16 * M;",
                "threadIdx.x / 32 * 16;",
            ),
        ],
    ),
    ("attention_in_windows", &[fault("attention", "columns behind a head are read", "&& c < D", "")]),
    (
        "a_row_has_the_same_bits_in_every_batch",
        &[
            fault(
                "linear",
                "waits for one stage too few",
                "wait_copies<STAGES - 2>",
                "wait_copies<STAGES - 1>",
            ),
            fault(
                "linear",
                "no barrier before a stage is read",
                "wait_copies<STAGES - 2>();\n        sync_block();",
                "wait_copies<STAGES - 2>();",
            ),
            fault(
                "linear",
                "the first part is forgotten",
                "if (p + e < parts) UNROLL",
                "if (p + e > 0 && p + e < parts) UNROLL",
            ),
            fault("linear", "a row too many is read", "w_in[j] = r < w.n;", "w_in[j] = r <= w.n;"),
            fault("linear", "rows of another batch", "j * X_ROWS < rows", "j * X_ROWS <= rows"),
            fault("linear", "the next 16 columns of a fragment", "c / 16 % 2][0]", "0][0]"),
            fault(
                "linear",
                "the first columns of x take each other's place",
                "to_x + s * X_STAGE + j",
                "to_x + j",
            ),
            fault(
                "linear",
                "the first rows of another batch",
                "xr + j * X_ROWS < rows) words",
                "true) words",
            ),
            fault(
                "prim",
                "every block finishes a tile",
                "count(counter, blocks - 1) == blocks - 1",
                "count(counter, blocks - 1) == 0",
            ),
        ],
    ),
    (
        "products_with_codes_equal_those_with_widened_weights",
        &[
            fault("linear", "codes of another column", "shift = c / 16 * BITS", "shift = c / 32 * BITS"),
            fault("linear", "the scale of another group", "scales[h][c / 64]", "scales[h][0]"),
            fault("linear", "the scales of the step before", "fetch_scales(s + 1)", "fetch_scales(s)"),
            fault("prim", "codes of another word", "q % 16]", "q / per_word]"),
        ],
    ),
    (
        "edges::sums_that_use_each_stage_again",
        &[fault(
            "linear",
            "a stage is written before it was read",
            "fetch_x(s + STAGES - 1)",
            "fetch_x(s + STAGES)",
        )],
    ),
    (
        "swiglu_of_few_rows_has_the_bits_of_two_kernels",
        &[
            fault("linear", "gate twice", "of < OWN ? w.at : l1.at", "w.at"),
            fault("linear", "the scales of gate twice", "of < OWN ? w.scales : l1.scales", "w.scales"),
            fault("linear", "the bias of gate twice", "j < OWN ? l0 : l1", "l0"),
            fault("linear", "gate and up are not rounded", "f32(bf16(acc[b][e]", "((acc[b][e]"),
            fault("linear", "the parts of a line overlap", "ROW = WEIGHT_ROWS + 4", "ROW = WEIGHT_ROWS - 4"),
            fault(
                "linear",
                "sums take the place of a stage that others read",
                "float* sums = (float*)shared;\n        sync_block();",
                "float* sums = (float*)shared;",
            ),
            fault(
                "linear",
                "no barrier before sums are read",
                "out) : 0)));\n        }\n        sync_block();",
                "out) : 0)));\n        }",
            ),
        ],
    ),
    (
        "layers_share_a_launch",
        &[fault("linear", "another layer's columns", "stride + place.col + out, end", "stride + out, end")],
    ),
    (
        "norms",
        &[
            fault("norms", "a factor of the deviation is missing", "red) * r * r / dim", "red) * r / dim"),
            fault("norms", "columns behind the end count for the variance", "e < 4 && j + e < dim", "e < 4"),
            fault("norms", "a row is only as long as a block", "j += blockDim.x * 4", "j += dim"),
            fault(
                "norms",
                "the sum in bf16 lacks what was there",
                "if (low.at) store4(low, at + j, at + dim, to);",
                "if (low.at) store4(low, at + j, at + dim, d);",
            ),
            fault(
                "prim",
                "no barrier before sums of warps are read",
                "red[threadIdx.x / 32] = x;\n    sync_block();\n    T sum",
                "red[threadIdx.x / 32] = x;\n    T sum",
            ),
            fault(
                "prim",
                "no barrier after sums of warps were read",
                "sum += red[w];\n    sync_block();",
                "sum += red[w];",
            ),
            fault(
                "prim",
                "half of a warp is summed",
                "for (int mask = 16; mask; mask /= 2) x += ",
                "for (int mask = 8; mask; mask /= 2) x += ",
            ),
            fault(
                "sums",
                "rows behind the end are summed",
                "begin + per_part < rows ? begin + per_part : rows",
                "begin + per_part",
            ),
            fault("sums", "a sum replaces what was there", "to[j] += sum", "to[j] = sum"),
        ],
    ),
    (
        "elements",
        &[
            fault(
                "prim",
                "four elements are stored where fewer are left",
                "if (i + 4 > end || at % (a.bf16 ? 8 : 16)) {\n        for (int e = 0; e < 4; e++) if (i + e < end) store",
                "if (at % (a.bf16 ? 8 : 16)) {\n        for (int e = 0; e < 4; e++) if (i + e < end) store",
            ),
            fault("elementwise", "rows of a copy are not chosen", "from_rows ? from_rows[row] : row", "row"),
            fault("elementwise", "a rotation is not turned back", "sign * sines", "sines"),
            fault(
                "elementwise",
                "an activation again lacks its factor",
                "out.x[e] = g.x[e] * (s * u.x[e])",
                "out.x[e] = g.x[e] * s",
            ),
            fault(
                "elementwise",
                "rows of an activation again are as long as its input's",
                "store4(y, row * inner + col, (row + 1) * inner, out)",
                "store4(y, at + col, (row + 1) * inner, out)",
            ),
        ],
    ),
    (
        "sums",
        &[
            fault(
                "sums",
                "a block sums what the next one does too",
                "begin + per_block < n ? begin + per_block : n",
                "n",
            ),
            fault(
                "sums",
                "rows are as long as what is summed of them",
                "row * a_stride + j",
                "row * cols + j",
            ),
            fault(
                "sums",
                "all sums replace the first rows",
                "targets ? targets[blockIdx.x] : blockIdx.x",
                "blockIdx.x",
            ),
            fault(
                "sums",
                "four elements behind a row are stored",
                "store4(y, at + j, at + cols, sum)",
                "store4(y, at + j, at + cols + 3, sum)",
            ),
            fault("sums", "rows are not weighed", "weights ? weights[i] : 1", "1"),
        ],
    ),
    (
        "plain_attention_of_any_width",
        &[
            fault(
                "plain_attention",
                "no barrier before probabilities are read",
                "exp_(score - now);\n        sync_block();",
                "exp_(score - now);",
            ),
            fault("plain_attention", "a query does not see itself", "row + it.off;", "row + it.off - 1;"),
        ],
    ),
    (
        "decoding_does_not_depend_on_the_batch",
        &[
            fault(
                "plain_attention",
                "own rows are read from the prompt",
                "of_prompt ? it.prompt : pages",
                "true ? it.prompt : pages",
            ),
            fault(
                "plain_attention",
                "a token is written behind its place",
                "own % PAGE) * width",
                "it.length % PAGE) * width",
            ),
            fault(
                "attention",
                "waits for one group of copies too few",
                "wait_copies<STAGES - 1>",
                "wait_copies<STAGES>",
            ),
            fault(
                "attention",
                "no barrier before a stage is read",
                "else wait_copies<0>();\n        sync_block();",
                "else wait_copies<0>();",
            ),
            fault(
                "attention",
                "keys behind a part are seen",
                "if (at + j * 8 + 2 * t + e % 2 >= end)",
                "if (false)",
            ),
            fault("attention", "a warp is left out", "PART, WARPS, 16 * PART", "PART, WARPS - 1, 16 * PART"),
            fault("attention", "a key that was not appended", "at + r == newest ? fresh + c : page", "page"),
            fault(
                "attention",
                "keys behind the end of a page's part",
                "2 * t + e % 2 >= end) s[j][e] = -INFINITY;\n        softmax_step<D, 2>",
                "2 * t + e % 2 > end) s[j][e] = -INFINITY;\n        softmax_step<D, 2>",
            ),
            fault(
                "attention",
                "the completion's parts are joined alone",
                "join(sum, from, (it.prompt_rows",
                "if (it.prompt_rows < 0) join(sum, from, (it.prompt_rows",
            ),
            fault(
                "attention",
                "another completion's part",
                "tile.row0 + pair / sh.group, head",
                "tile.row0 + pair % sh.group, head",
            ),
            fault(
                "attention",
                "a first layer's keys",
                "(i64)layer * it.prompt_rows * 2",
                "(i64)0 * it.prompt_rows * 2",
            ),
            fault(
                "plain_attention",
                "parts of the keys overlap",
                "begin + SPLIT < total ? begin + SPLIT : total",
                "total",
            ),
        ],
    ),
    (
        "decoding_of_every_group_size",
        &[
            fault("attention", "the key for the value", "(key + 2 * PAGE * LD + c)", "(key + c)"),
            fault(
                "attention",
                "the keys of the first stage twice",
                "const u16* first = k + (i64)at * 2 * width;",
                "const u16* first = k + (i64)begin * 2 * width;",
            ),
            fault(
                "attention",
                "each tile of heads is the first one",
                "first = blockIdx.y % tiles * HEADS",
                "first = 0",
            ),
        ],
    ),
    (
        "the_head",
        &[
            fault(
                "head",
                "sums of pieces are not brought to one scale",
                "a * old.s + b * s",
                "old.s + b * s",
            ),
            fault("head", "targets of the first piece alone", "tokens[t] == first + j", "tokens[t] == j"),
        ],
    ),
    (
        "draws_are_those_of_a_sorted_row",
        &[
            fault(
                "sample",
                "an equal logit is lost at the cut",
                "list[j].id > own.id",
                "list[j].id >= own.id",
            ),
            fault(
                "sample",
                "no barrier before sums are read",
                "warps[threadIdx.x / 32] = own;\n        sync_block();",
                "warps[threadIdx.x / 32] = own;",
            ),
            fault(
                "sample",
                "no barrier before bins are read",
                "mass(x));\n        });\n        sync_block();",
                "mass(x));\n        });",
            ),
            fault("sample", "a long list is not noticed", "size[0] > LISTED", "size[0] > 4 * LISTED"),
            fault(
                "sample",
                "tokens in front of the bin have no weight",
                "u64 sum = place.before, mass = before",
                "u64 sum = place.before, mass = 0",
            ),
        ],
    ),
    (
        "convolutions",
        &[
            fault("conv", "a patch reads outside of the picture", "source == OUTSIDE ? 0.0f : load", "load"),
            fault(
                "conv",
                "channels and taps are exchanged",
                "channel = n / taps % c, tap = n % taps",
                "channel = n % c, tap = n / c % taps",
            ),
            fault("conv", "a gradient replaces what was there", "float sum = load(dx, n);", "float sum = 0;"),
            fault("conv", "a picture goes on in the one above", "cy + dy < 0 || ", ""),
            fault("conv", "the gradient's kernel is not turned", "flip ? 8 - tap : tap", "tap"),
            fault(
                "conv",
                "rows behind the end count for the weight",
                "begin + per_part < rows ? begin + per_part : rows",
                "begin + per_part",
            ),
            fault("conv", "a gate's row is another's", "i / (s * c) * c + i % c", "i % c"),
            fault("conv", "a gate's gradient is of its first row", "j < s; j++", "j < 1; j++"),
            fault(
                "conv",
                "rows and columns of a picture are exchanged",
                "cy = row / w % h",
                "cy = row / h % w",
            ),
            fault("conv", "all gradients of a patch go to its first tap", "entries[e] % taps", "0"),
        ],
    ),
    (
        "a_blend_of_several_parts",
        &[fault("conv", "parts of an alternative are left out", "part < parts; part++", "part < 1; part++")],
    ),
    (
        "experts",
        &[
            fault("experts", "places behind the end are computed", "if (i >= places * n) return;", ""),
            fault("experts", "another stride of places", "place * k + j", "place * n + j"),
            fault("experts", "the first expert's matrix for all", "(i64)experts[place] * k", "0"),
            fault(
                "experts",
                "a product is rounded at each step",
                "sum += load(x, place * k + j) * load(w, (row + j) * n + col);",
                "{ sum += load(x, place * k + j) * load(w, (row + j) * n + col); store(y, i, sum); sum = load(y, i); }",
            ),
            fault(
                "experts",
                "few places: the matrix of the first expert",
                "((i64)expert * k + line) * n",
                "((i64)line) * n",
            ),
            fault(
                "experts",
                "few places: lines are outputs",
                "load_matrices<true>(a, tw",
                "load_matrices<false>(a, tw",
            ),
            fault(
                "experts",
                "few places: a place takes that of another",
                "if (i < threadIdx.x) at += counts[i]",
                "if (i + 1 < threadIdx.x) at += counts[i]",
            ),
            fault(
                "experts",
                "few places: stages are filled while others read them",
                "wait_copies<0>();\n        sync_block();\n    }",
                "wait_copies<0>();\n    }",
            ),
            fault("experts", "large logits overflow", "top = larger(top, load", "top = 0 * larger(top, load"),
            fault(
                "experts",
                "logits of experts that were not chosen",
                "row * all + experts[place]) - top",
                "row * all + j) - top",
            ),
            fault(
                "experts",
                "places of the row before",
                "u32 place = places[row * each + j]",
                "u32 place = places[row * each - row + j]",
            ),
            fault(
                "experts",
                "weights do not sum to 1",
                "weights[places[row * each + j]] /= sum",
                "weights[places[row * each + j]] /= each",
            ),
            fault("experts", "the last columns are not scaled", "quads = (cols + 3) / 4", "quads = cols / 4"),
            fault(
                "experts",
                "four elements behind a place are stored",
                "store4(y, at, end, v)",
                "store4(y, at, end + 3, v)",
            ),
            fault("experts", "a place is only as long as a block", "i += blockDim.x * 4", "i += cols"),
            fault(
                "experts",
                "one warp's sum for the block's",
                "sum = block_sum(sum, red)",
                "sum = warp_sum(sum)",
            ),
            fault(
                "experts",
                "gradients of a softmax without their mean",
                "(dots[place] - mean)",
                "dots[place]",
            ),
            fault(
                "experts",
                "gradients of another row's logits",
                "dlogits[row * all + experts",
                "dlogits[row * each + experts",
            ),
        ],
    ),
    (
        "a_router_chooses_the_largest_logits",
        &[
            fault("experts", "zeros of different signs differ", "b == 0x80000000u ? 0 : b", "b"),
            fault("experts", "of equal logits, the last expert", "(LAST - e)", "(u32)(e + 1)"),
            fault(
                "experts",
                "the experts of a row in the order of logits",
                "own[to - 1] > expert",
                "own[to - 1] < 0",
            ),
            fault(
                "experts",
                "the last row without places",
                "offsets[row + 1] = first + topk",
                "offsets[row + 1] = first",
            ),
        ],
    ),
    (
        "edges::choices_beside_the_buckets",
        &[
            fault(
                "sample",
                "rows beyond a warp take other rows' random numbers",
                "uniforms[blockIdx.x]",
                "uniforms[blockIdx.x % 32]",
            ),
            fault(
                "experts",
                "rows beyond a bucket have no sums",
                "offsets[row] = first;",
                "offsets[row] = row < 16 ? first : 0;",
            ),
        ],
    ),
    (
        "edges::nan_is_never_hidden_from_a_choice",
        &[
            fault(
                "sample",
                "a row with a NaN is drawn from",
                "!(lse[blockIdx.x] < INFINITY)",
                "lse[blockIdx.x] == INFINITY",
            ),
            fault(
                "experts",
                "a NaN is never chosen",
                "at < last && at > best",
                "at < last && at > best && logits.at && load(logits, (i64)row * all + e) < INFINITY",
            ),
        ],
    ),
    (
        "step::kernels_of_a_step_wait_for_those_before_them",
        &[
            fault("norms", "a norm does not wait", "start_next(), wait_previous();", "start_next();"),
            fault(
                "linear",
                "a product does not wait",
                "    wait_previous();\n    // The first",
                "    // The first",
            ),
            fault(
                "attention",
                "attention to a prompt does not wait",
                "wait_previous(), start_next();",
                "start_next();",
            ),
            fault(
                "attention",
                "attention to a completion does not wait",
                "    wait_previous();\n    if (!finishes_last(",
                "    if (!finishes_last(",
            ),
            fault(
                "attention",
                "a block without keys does not wait",
                "if (blockIdx.z >= own_parts || prompt_parts == 0) wait_previous();",
                "if (prompt_parts == 0) wait_previous();",
            ),
            fault("sample", "a draw does not wait", "start_next(), wait_previous();", "start_next();"),
        ],
    ),
    (
        "step::queries_and_keys_are_turned_as_by_their_own_kernels",
        &[
            fault(
                "attention",
                "the angles of another row",
                "(i64)row_of(r) * turn.half",
                "(i64)r * turn.half",
            ),
            fault("attention", "the new key is not turned", "turned<D>(key, 1, turn, k_norm, this_row);", ""),
            fault(
                "attention",
                "the norm of queries for keys",
                "turned<D>(key, 1, turn, k_norm",
                "turned<D>(key, 1, turn, q_norm",
            ),
            fault("attention", "queries are turned for every page", "if (stage == 0) turned<D>", "turned<D>"),
            fault(
                "attention",
                "the key is appended as it came",
                "*(const Words4*)(key + c)",
                "*(const Words4*)(fresh + c)",
            ),
            fault(
                "attention",
                "no barrier between norm and rotation",
                "pack(v.x[2], v.x[3])}};\n        }\n        sync_block();",
                "pack(v.x[2], v.x[3])}};\n        }",
            ),
            fault(
                "attention",
                "no barrier after the rotation",
                "bf16(pair.high);\n        }\n    }\n    sync_block();",
                "bf16(pair.high);\n        }\n    }",
            ),
            fault("attention", "the weight of a norm is not shifted", "w.x[e] + turn.shift", "w.x[e]"),
            fault(
                "attention",
                "waits for one stage of a prompt too few",
                "wait_copies<STAGES - 1>();\n        else wait_copies<0>();",
                "wait_copies<STAGES>();\n        else wait_copies<1>();",
            ),
        ],
    ),
    (
        "draws_are_those_of_a_sorted_row",
        &[
            fault(
                "sample",
                "the last segment has no weight",
                "s < segments; s++) mass +=",
                "s + 1 < segments; s++) mass +=",
            ),
            fault(
                "sample",
                "the segment before the one of the token",
                "of = segment_of(vocab, s, segments);",
                "of = segment_of(vocab, s ? s - 1 : 0, segments);",
            ),
            fault(
                "sample",
                "the first segment's bins for all",
                "bin_masses[(first + s)",
                "bin_masses[(first)",
            ),
            fault("sample", "a larger maximum reduces no sum", "a = exp_(all.top - top)", "a = 1"),
            fault("sample", "segments before count twice", "target - before, runs", "target, runs"),
            fault(
                "sample",
                "the last columns of a row are left out",
                "if (whole + threadIdx.x < of.end)",
                "if (false)",
            ),
            fault("sample", "segments overlap", "begin + each < vocab ? begin + each : vocab", "vocab"),
        ],
    ),
    (
        "a_step_to_a_tie_rounds_to_even",
        &[fault("elementwise", "ties are rounded up", "whole -= (whole & 0x1ffffu) == 0x8000u;", "")],
    ),
    (
        "updates_in_few_bits_are_those_of_the_cpu",
        &[
            fault(
                "elementwise",
                "the second half of a block has the codes of the first",
                "m[i / 4] = m_codes",
                "m[first / 4] = m_codes",
            ),
            fault(
                "elementwise",
                "a lane has a scale of its own",
                "top = larger(top, shuffle_xor(top, mask));",
                "",
            ),
            fault("elementwise", "codes lose their sign", "(me < 0 && code ? 128u : 0u)", "0u"),
            fault(
                "elementwise",
                "the second moment has the intervals of the first",
                "code_value(v_code, 7)",
                "code_value(v_code, 6)",
            ),
            fault(
                "elementwise",
                "small second moments become 0",
                "x >= (n == 6 ? 1e-6f : 1.17549435e-38f) ? code : 0",
                "x >= 1e-6f ? code : 0",
            ),
            fault(
                "elementwise",
                "the elements of a quad share a random number",
                "(u32)(i + e) * 0x9e3779b9u",
                "(u32)i * 0x9e3779b9u",
            ),
            fault(
                "elementwise",
                "a random number has 15 bits",
                "(h >> 16)) & 0xffff0000u",
                "(h >> 17)) & 0xffff0000u",
            ),
        ],
    ),
    (
        "recurrent::groups_equal_the_recurrence_and_its_gradients",
        &[
            fault(
                "delta",
                "factors are read before all have been written",
                "            else b[p * RIGHT + j] = x;\n        }\n        sync_block();",
                "            else b[p * RIGHT + j] = x;\n        }",
            ),
            fault(
                "delta",
                "factors are written before all have been read",
                "first += SLAB) {\n        sync_block();",
                "first += SLAB) {",
            ),
            fault(
                "delta",
                "the rest of a left factor is left out",
                "mma(sums.x[n + h], rest, bh[2 * h], bh[2 * h + 1]);",
                "",
            ),
            fault(
                "delta",
                "the rest of a right factor is left out",
                "mma(sums.x[n + h], high, br[2 * h], br[2 * h + 1]);",
                "",
            ),
            fault(
                "delta",
                "a row is not corrected by the one before it",
                "j < i && i < c.at.rows",
                "j + 1 < i && i < c.at.rows",
            ),
            fault(
                "delta",
                "the rest of a sum of decays is left out",
                " + (rows[CHUNK + t] - rows[CHUNK + s])",
                "",
            ),
            fault(
                "delta",
                "another head's keys",
                "key_head(head / (r.value_heads / r.key_heads))",
                "key_head(head % r.key_heads)",
            ),
            fault("delta", "a state does not fade", "whole() * other[at]", "other[at]"),
            fault(
                "delta",
                "a short chunk ends with its last row's successor",
                "since(at.rows - 1)",
                "since(CHUNK - 1)",
            ),
            fault(
                "delta",
                "the first completion alone reaches the prompt",
                "next < run.next1; next++",
                "next < run.next0 + 1; next++",
            ),
            fault(
                "delta",
                "a key has no gradient from later rows",
                "if (s > i) pn[i * EDGE + s] = pn[s * EDGE + i];",
                "if (s > i) pn[i * EDGE + s] = 0;",
            ),
            fault("delta", "a row of a block of sixteen is not subtracted", "z < y; z++", "z < y - 1; z++"),
            fault(
                "delta",
                "the gradient of a length is left out",
                "slope(p) - load(qkv, at + p) * along",
                "slope(p)",
            ),
            fault("delta", "the end of a chunk has no gradient of decays", "sum += ends[i];\n", ""),
        ],
    ),
    (
        "recurrent::convolutions_gates_and_norms",
        &[
            fault(
                "recurrent",
                "a window is read backwards",
                "load(weight, channel * taps + taps - 1 - back) * load(x",
                "load(weight, channel * taps + back) * load(x",
            ),
            fault("recurrent", "rows that read a row beyond the window", "if (back < taps) sum", "sum"),
            fault("recurrent", "a decay is not negative", "y[at] = -exp_", "y[at] = exp_"),
            fault(
                "recurrent",
                "the gate has no gradient through its slope",
                "s * (1 + g.x[e] * (1 - s))",
                "s",
            ),
        ],
    ),
    (
        "recurrent::steps_continue_states",
        &[
            fault("recurrent", "an output without its own row", "decay * sq + along * u", "decay * sq"),
            fault(
                "recurrent",
                "inputs are not moved on",
                "? before[i + 1 < WINDOW - 1 ? i + 1 : i] : own",
                "? before[i] : own",
            ),
            fault("recurrent", "another row's state", "table[blockIdx.x]", "table[0]"),
        ],
    ),
];

/// Time after which a test hangs, which is no way of finding one of these faults.
const LIMIT: Duration = Duration::from_secs(300);

impl Fault {
    /// Returns the file of kernels to compile. Faults of the shared file concern norms, single elements or products.
    fn compiled(&self) -> &'static str {
        match self.file {
            "prim" if self.what.contains("stored") => "elementwise",
            "prim" if self.what.contains("tile") || self.what.contains("codes") => "linear",
            "prim" => "norms",
            file => file,
        }
    }
}

/// Returns the text of a file of kernels. Two head widths suffice, and compile in half the time.
fn text(file: &str) -> String {
    let name = format!("cuda/{file}.{}", if file == "prim" { "cuh" } else { "cu" });
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap();
    text.replace("OF_WIDTH(80)\nOF_WIDTH(128)\nOF_SMALL_BLOCKS(128)\n", "")
}

/// Compiles a file of kernels that is in `folder`, or the scheduler `emu`.
fn compile(folder: &Path, name: &str) -> PathBuf {
    let emulator = Path::new(env!("CARGO_MANIFEST_DIR")).join("emu");
    let (object, source) = (folder.join(format!("{name}.o")), folder.join(format!("of-{name}.cpp")));
    let text = match name {
        "emu" => "#include \"emu.cpp\"\n".to_owned(),
        _ => format!("#define KERNEL_FILE \"{name}\"\n#include \"{name}.cu\"\n"),
    };
    std::fs::write(&source, text).unwrap();
    let flags = ["-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-DEMULATED"];
    let mut command = Command::new("g++");
    command.args(flags).arg("-I").arg(emulator).arg("-c").arg(source).arg("-o").arg(&object);
    assert!(command.status().unwrap().success(), "{name} does not compile");
    object
}

/// Links kernels, and runs a test with them. Returns whether it passes, or `None` if it does not end.
fn passes(library: &Path, objects: &[PathBuf], test: &str) -> Option<bool> {
    let linked = Command::new("g++").args(["-shared", "-o"]).arg(library).args(objects).status();
    assert!(linked.unwrap().success());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact"])
        .env("OMNIGRPO_TEST_KERNELS", library)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status.success());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// Tests the tests: each fault makes its test fail. Compiles changed kernels with g++ and runs this program again.
/// `OMNIGRPO_TEST_FAULTS=linear,attention` restricts the faults to these files.
#[test]
#[ignore = "slow: compiles kernels anew for each fault"]
fn slow_planted_faults_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base");
    std::fs::create_dir(&base).unwrap();
    let names: Vec<&str> = omnigrpo_gpu::sources::FILES.iter().map(|(name, _)| *name).collect();
    std::fs::write(base.join("prim.cuh"), text("prim")).unwrap();
    names.iter().for_each(|name| std::fs::write(base.join(format!("{name}.cu")), text(name)).unwrap());
    let objects: Vec<_> = names.iter().copied().chain(["emu"]).map(|name| compile(&base, name)).collect();
    let files = std::env::var("OMNIGRPO_TEST_FAULTS").ok();
    let chosen =
        |fault: &&Fault| files.as_ref().is_none_or(|files| files.split(',').any(|file| file == fault.file));
    for (test, _) in FAULTS.iter().filter(|(_, faults)| faults.iter().any(|fault| chosen(&fault))) {
        assert_eq!(passes(&base.join("kernels.so"), &objects, test), Some(true), "{test} without a fault");
    }
    // Returns what is wrong with the tests if a fault is not found.
    let missed = |number: usize, test: &str, Fault { file, what, from, to }: &Fault, compiled: &str| {
        let folder = dir.path().join(number.to_string());
        std::fs::create_dir(&folder).unwrap();
        for name in ["prim", compiled] {
            let own = text(name);
            let changed = if name == *file { own.replace(from, to) } else { own.clone() };
            assert!(name != *file || changed != own, "{file}: {what}: the text is not there");
            let ending = if name == "prim" { "cuh" } else { "cu" };
            std::fs::write(folder.join(format!("{name}.{ending}")), changed).unwrap();
        }
        let mut objects = objects.clone();
        objects[names.iter().position(|name| *name == compiled).unwrap()] = compile(&folder, compiled);
        let result = passes(&folder.join("kernels.so"), &objects, test);
        std::fs::remove_dir_all(&folder).unwrap();
        match result {
            Some(false) => None,
            Some(true) => Some(format!("{file}: {what}: {test} passes")),
            None => Some(format!("{file}: {what}: {test} does not end within {LIMIT:?}")),
        }
    };
    let all = FAULTS.iter().flat_map(|(test, faults)| faults.iter().map(move |fault| (*test, fault)));
    let all: Vec<_> = all.filter(|(_, fault)| chosen(fault)).collect();
    let missed: Vec<String> = all
        .par_iter()
        .with_max_len(1)
        .enumerate()
        .filter_map(|(number, (test, fault))| missed(number, test, fault, fault.compiled()))
        .collect();
    assert!(missed.is_empty(), "of {} faults these were missed: {missed:#?}", all.len());
}
