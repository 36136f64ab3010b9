//! The test of the tests: each fault planted in a kernel makes a test fail.

/// A fault planted in a file of kernels by replacing text, and the tests of which one must find it.
struct Fault {
    file: &'static str,
    what: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn fault(file: &'static str, what: &'static str, from: &'static str, to: &'static str) -> Fault {
    Fault { file, what, from, to }
}

/// Faults of every kind: barriers, waits, masks, bounds, fragments, strides, formulas. Every occurrence of the text is
/// replaced.
const FAULTS: &[Fault] = &[
    fault(
        "attention",
        "no barrier after copies have arrived",
        "wait_copies<1>();\n        sync_block();",
        "wait_copies<1>();",
    ),
    fault(
        "attention",
        "no barrier before a stage is written again",
        "accumulate<D, N>(acc, s, sv + stage * ROWS * LD);\n        sync_block();",
        "accumulate<D, N>(acc, s, sv + stage * ROWS * LD);",
    ),
    fault("attention", "waits for one group of copies too few", "wait_copies<1>", "wait_copies<2>"),
    fault("attention", "waits for no copies in the backward pass", "wait_copies<0>", "wait_copies<1>"),
    fault(
        "attention",
        "the causal mask is off by one",
        "key >= row + e / 2 * 8 + it.off",
        "key > row + e / 2 * 8 + it.off",
    ),
    fault("attention", "no mask on the last keys", "c.at + ROWS > it.k1 ||", "c.at > it.k1 ||"),
    fault(
        "attention",
        "no barrier at the end of a step over queries",
        "accumulate<D, N>(acc_k, s, sq);\n        sync_block();",
        "accumulate<D, N>(acc_k, s, sq);",
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
        "wait_copies<1>();\n        sync_block();",
        "wait_copies<1>();\n        if (threadIdx.x < 96) sync_block();",
    ),
    fault("attention", "rows behind the end are stored", "if (row + g < end)", ""),
    fault(
        "attention",
        "the gradient is read with another stride",
        "sd, dout + head * D, sh.out_stride, tile",
        "sd, dout + head * D, sh.stride, tile",
    ),
    fault(
        "attention",
        "the last head's gradient is left out",
        "for (int h = 0; h < group; h++)",
        "for (int h = 0; h < group - 1; h++)",
    ),
    fault("attention", "another head's keys", "kv = head / sh.group", "kv = head % sh.group"),
    fault("attention", "columns behind a head are read", "&& c < D", ""),
    fault("attention", "keys before the range have a gradient", "key >= it.k0 && ", ""),
    fault(
        "attention",
        "the gradient of queries is not scaled",
        "dq + head * D, acc, sh.scale, sh.scale",
        "dq + head * D, acc, 1, 1",
    ),
    fault("attention", "one transposition too many", "load_matrices<true>", "load_matrices<false>"),
    fault("linear", "waits for one stage too few", "wait_copies<STAGES - 2>", "wait_copies<STAGES - 1>"),
    fault(
        "linear",
        "no barrier before a stage is read",
        "wait_copies<STAGES - 2>();\n        sync_block();",
        "wait_copies<STAGES - 2>();",
    ),
    fault(
        "linear",
        "the first part is forgotten",
        "for (int p = 0; p < parts; p++)",
        "for (int p = 1; p < parts; p++)",
    ),
    fault("linear", "a row too many is read", "first + r < w.n && piece", "first + r <= w.n && piece"),
    fault("linear", "columns behind the end are read", " && at * D + c < k;", ";"),
    fault("linear", "codes of another column", "shift = c / 16 * BITS", "shift = c / 32 * BITS"),
    fault("linear", "the scale of another group", "scales[h][c / 64]", "scales[h][0]"),
    fault("linear", "the scales of the step before", "fetch_scales(s + 1)", "fetch_scales(s)"),
    fault("linear", "another layer's columns", "stride + place.col + out, sum", "stride + out, sum"),
    fault(
        "prim",
        "every block finishes a tile",
        "count(counter, blocks - 1) == blocks - 1",
        "count(counter, blocks - 1) == 0",
    ),
    fault("prim", "codes of another word", "q % 16]", "q / per_word]"),
    fault("norms", "a factor of the deviation is missing", "red) * r * r / dim", "red) * r / dim"),
    fault("norms", "columns behind the end count for the variance", "e < 4 && j + e < dim", "e < 4"),
    fault("norms", "a row is only as long as a block", "j += blockDim.x * 4", "j += dim"),
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
        "prim",
        "four elements are stored where fewer are left",
        "if (i + 4 > end || at % (a.bf16 ? 8 : 16)) {\n        for (int e = 0; e < 4; e++) if (i + e < end) store",
        "if (at % (a.bf16 ? 8 : 16)) {\n        for (int e = 0; e < 4; e++) if (i + e < end) store",
    ),
    fault(
        "sums",
        "rows behind the end are summed",
        "begin + per_part < rows ? begin + per_part : rows",
        "begin + per_part",
    ),
    fault("sums", "a sum replaces what was there", "to[j] += sum", "to[j] = sum"),
    fault(
        "sums",
        "a block sums what the next one does too",
        "begin + per_block < n ? begin + per_block : n",
        "n",
    ),
    fault(
        "plain_attention",
        "no barrier before probabilities are read",
        "exp_(score - now);\n        sync_block();",
        "exp_(score - now);",
    ),
    fault("plain_attention", "a query does not see itself", "row + it.off;", "row + it.off - 1;"),
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
    fault("attention", "keys behind a part are seen", "if (at + j * 8 + 2 * t + e % 2 >= end)", "if (false)"),
    fault("attention", "a warp is left out", "PART, WARPS, 16 * PART", "PART, WARPS - 1, 16 * PART"),
    fault("attention", "a key that was not appended", "at + r == newest ? fresh + c : page", "page"),
    fault(
        "attention",
        "each tile of heads is the first one",
        "first = blockIdx.y % tiles * HEADS",
        "first = 0",
    ),
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
    fault("head", "sums of pieces are not brought to one scale", "a * old.s + b * s", "old.s + b * s"),
    fault("head", "targets of the first piece alone", "tokens[t] == first + j", "tokens[t] == j"),
    fault("sample", "an equal logit is lost at the cut", "list[j].id > own.id", "list[j].id >= own.id"),
    fault(
        "sample",
        "no barrier before sums are read",
        "warps[threadIdx.x / 32] = own;\n        sync_block();",
        "warps[threadIdx.x / 32] = own;",
    ),
    fault(
        "sample",
        "no barrier before bins are read",
        "mass(z[id]));\n        }\n        sync_block();",
        "mass(z[id]));\n        }",
    ),
    fault("sample", "a long list is not noticed", "size[0] > LISTED", "size[0] > 4 * LISTED"),
    fault(
        "sample",
        "tokens in front of the bin have no weight",
        "u64 sum = place.before, mass = before",
        "u64 sum = place.before, mass = 0",
    ),
    fault("sums", "rows are as long as what is summed of them", "row * a_stride + j", "row * cols + j"),
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
    fault("conv", "parts of an alternative are left out", "part < parts; part++", "part < 1; part++"),
    fault("experts", "places behind the end are computed", "if (i >= places * n) return;", ""),
    fault("experts", "another stride of places", "place * k + j", "place * n + j"),
    fault("experts", "the first expert's matrix for all", "(i64)experts[place] * k", "0"),
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
    fault(
        "experts",
        "a product is rounded at each step",
        "sum += load(x, place * k + j) * load(w, (row + j) * n + col);",
        "{ sum += load(x, place * k + j) * load(w, (row + j) * n + col); store(y, i, sum); sum = load(y, i); }",
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
    fault("experts", "one warp's sum for the block's", "sum = block_sum(sum, red)", "sum = warp_sum(sum)"),
    fault("experts", "gradients of a softmax without their mean", "(dots[place] - mean)", "dots[place]"),
    fault(
        "experts",
        "gradients of another row's logits",
        "dlogits[row * all + experts",
        "dlogits[row * each + experts",
    ),
    fault("conv", "rows and columns of a picture are exchanged", "cy = row / w % h", "cy = row / h % w"),
    fault("conv", "all gradients of a patch go to its first tap", "entries[e] % taps", "0"),
    fault("elementwise", "rows of a copy are not chosen", "from_rows ? from_rows[row] : row", "row"),
    fault("elementwise", "a rotation is not turned back", "sign * sines", "sines"),
    fault("elementwise", "ties are rounded up", "whole -= (whole & 0x1ffffu) == 0x8000u;", ""),
];

/// Tests the tests: every fault makes one of them fail. Compiles changed kernels with g++ and runs this program again.
#[test]
#[ignore = "slow: compiles kernels anew for each fault"]
fn slow_planted_faults_are_found() {
    use std::path::Path;
    use std::process::{Command, Stdio};
    let (here, dir) = (Path::new(env!("CARGO_MANIFEST_DIR")), tempfile::tempdir().unwrap());
    let names: Vec<&str> = omnigrpo_gpu::sources::FILES.iter().map(|(name, _)| *name).collect();
    // Two head widths suffice, and compile in half the time.
    let text = |file: &str| {
        let path = here.join("cuda").join(format!("{file}.{}", if file == "prim" { "cuh" } else { "cu" }));
        std::fs::read_to_string(path).unwrap().replace("OF_WIDTH(80)\nOF_WIDTH(128)\n", "")
    };
    let compile = |folder: &Path, name: &str| {
        let object = folder.join(format!("{name}.o"));
        let source = match name {
            "emu" => here.join("emu/emu.cpp"),
            _ => {
                let wrapper = folder.join(format!("{name}.cpp"));
                let text = format!("#define KERNEL_FILE \"{name}\"\n#include \"{name}.cu\"\n");
                std::fs::write(&wrapper, text).unwrap();
                wrapper
            }
        };
        let status = Command::new("g++")
            .args(["-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-DEMULATED", "-c", "-o"])
            .arg(&object)
            .arg(source)
            .arg("-I")
            .arg(here.join("emu"))
            .status();
        assert!(status.unwrap().success(), "{name} does not compile");
        object
    };
    let base = dir.path().join("base");
    std::fs::create_dir(&base).unwrap();
    std::fs::write(base.join("prim.cuh"), text("prim")).unwrap();
    names.iter().for_each(|name| std::fs::write(base.join(format!("{name}.cu")), text(name)).unwrap());
    let objects: Vec<(&str, std::path::PathBuf)> =
        names.iter().copied().chain(["emu"]).map(|name| (name, compile(&base, name))).collect();
    // Returns whether the tests of a file fail with kernels of which one file is replaced.
    let found = |file: &str, replaced: Option<&Path>| {
        let library = dir.path().join("kernels.so");
        let parts = objects.iter().map(|(name, object)| match replaced {
            Some(own) if *name == file => own.to_path_buf(),
            _ => object.clone(),
        });
        let status = Command::new("g++").args(["-shared", "-o"]).arg(&library).args(parts).status();
        assert!(status.unwrap().success());
        let tests: &[&str] = match file {
            "attention" => &[
                "attention_with_shared_prefixes",
                "attention_in_windows",
                "attention_of_every_group_size",
                "decoding_does_not_depend_on_the_batch",
                "decoding_of_every_group_size",
            ],
            "linear" => &[
                "a_row_has_the_same_bits_in_every_batch",
                "layers_share_a_launch",
                "products_with_codes_equal_those_with_widened_weights",
                "quantised_weights_are_widened",
            ],
            "plain_attention" => &["plain_attention_of_any_width", "decoding_does_not_depend_on_the_batch"],
            "head" => &["the_head"],
            "sample" => &["draws_are_those_of_a_sorted_row", "a_row_without_a_distribution_has_no_token"],
            "conv" => &["convolutions", "a_blend_of_several_parts"],
            "experts" => &["experts", "a_router_chooses_the_largest_logits"],
            "elementwise" => &["elements", "a_step_to_a_tie_rounds_to_even"],
            _ => &["norms", "sums"],
        };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(tests)
            .args(["--exact", "--test-threads=1"])
            .env("OMNIGRPO_TEST_KERNELS", &library)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = std::time::Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return !status.success();
            }
            if start.elapsed().as_secs() > 300 {
                child.kill().unwrap();
                child.wait().unwrap();
                return true;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    names.iter().for_each(|file| assert!(!found(file, None), "{file}: fails without a fault"));
    let mut missed = Vec::new();
    for (i, Fault { file, what, from, to }) in FAULTS.iter().enumerate() {
        let folder = dir.path().join(i.to_string());
        std::fs::create_dir(&folder).unwrap();
        // The norms test a fault in the shared file; elementwise kernels test one that concerns single elements.
        let compiled = match *file {
            "prim" if what.contains("stored") => "elementwise",
            "prim" if what.contains("tile") || what.contains("codes") => "linear",
            "prim" => "norms",
            file => file,
        };
        for name in ["prim", compiled] {
            let own = text(name);
            let changed = if name == *file { own.replace(from, to) } else { own.clone() };
            assert!(name != *file || changed != own, "{file}: {what}: the text is not there");
            let ending = if name == "prim" { "cuh" } else { "cu" };
            std::fs::write(folder.join(format!("{name}.{ending}")), changed).unwrap();
        }
        let object = compile(&folder, compiled);
        if !found(compiled, Some(&object)) {
            missed.push(format!("{file}: {what}"));
        }
        println!(
            "{file}: {what}: {}",
            if missed.last().is_some_and(|m| m.ends_with(what)) { "MISSED" } else { "found" }
        );
    }
    assert!(missed.is_empty(), "of {} faults these were missed: {missed:#?}", FAULTS.len());
}
