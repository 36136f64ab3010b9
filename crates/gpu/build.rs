//! Generates the launchers of the kernels. With the feature `emulator`, compiles the kernels and the stand-in of NCCL.

use std::path::PathBuf;

#[path = "build/launchers.rs"]
mod launchers;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=cuda");
    let folder = |name| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    let generated = launchers::generate(&folder("CARGO_MANIFEST_DIR").join("cuda"));
    let path = folder("OUT_DIR").join("launchers.rs");
    if let Err(why) = generated.and_then(|text| std::fs::write(path, text).map_err(|error| error.to_string()))
    {
        println!("cargo::error=launchers of the kernels: {why}");
    }
    #[cfg(feature = "emulator")]
    emulator();
}

#[cfg(feature = "emulator")]
fn emulator() {
    println!("cargo::rerun-if-changed=emu");
    let folder = |name| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    let (here, out) = (folder("CARGO_MANIFEST_DIR"), folder("OUT_DIR"));
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).warnings(false).define("EMULATED", None);
    build.flag("-fno-strict-aliasing").include(here.join("emu")).include(here.join("cuda"));
    build.file(here.join("emu/emu.cpp"));
    let files = std::fs::read_dir(here.join("cuda")).into_iter().flatten().flatten();
    for path in files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "cu")) {
        // Each kernel file needs a C++ wrapper, because compilers choose the language by the extension.
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let wrapper = out.join(format!("{name}.cpp"));
        let text = format!("#define KERNEL_FILE \"{name}\"\n#include \"{}\"\n", path.display());
        if let Err(error) = std::fs::write(&wrapper, text) {
            println!("cargo::error=writing {}: {error}", wrapper.display());
        }
        build.file(wrapper);
    }
    // Kernels register themselves in a table before `main`. Nothing else refers to them, so the linker must keep the whole archive.
    build.link_lib_modifier("+whole-archive").compile("omnigrpo_kernels_emulated");
    nccl(&here.join("../../tools/gpu/stand-in"), &out);
}

/// Compiles the stand-in of NCCL, which emulators load.
#[cfg(feature = "emulator")]
fn nccl(source: &std::path::Path, out: &std::path::Path) {
    println!("cargo::rerun-if-changed={}", source.join("nccl.cpp").display());
    println!("cargo::rustc-env=OMNIGRPO_STAND_INS={}", out.display());
    let compiler = cc::Build::new().cpp(true).std("c++17").opt_level(2).get_compiler();
    let mut command = compiler.to_command();
    command.args(["-shared", "-fPIC", "-fvisibility=hidden"]).arg(source.join("nccl.cpp"));
    let done = command.arg("-o").arg(out.join("libnccl.so.2")).status();
    if !done.is_ok_and(|status| status.success()) {
        println!("cargo::error=the stand-in of NCCL cannot be compiled");
    }
}
