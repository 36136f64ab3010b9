//! Tests that find out which instructions for products of matrices, 16-bit floats and bytes work on this machine.
//!
//! On virtual machines, the instructions that a CPU announces can differ from those that a process may use. One machine hides the
//! CPUID leaf that describes matrix tiles, although the system allows tiles and products are correct. Another machine announces
//! an instruction but raises a signal when it runs.
//!
//! Therefore each test forks a child that only runs a small product with a known result. The child exits, is killed by a signal,
//! or is killed by an alarm after a few seconds. This process reads only its exit status.

use std::sync::OnceLock;

/// An instruction set and the outcome of its trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Name, such as `AMX`.
    pub name: &'static str,
    pub works: bool,
    /// Reason for the value of `works`, as a clause that can follow a colon.
    pub why: String,
    /// True if a required trial gave no answer: the trial could not start, or something other than the tested instructions ended
    /// it.
    pub untried: bool,
}

/// Returns every instruction set that is tested, for display.
///
/// Trials run once, at the first call. Call this function before the program starts threads and fills its memory, because a fork
/// is then cheap and rarely fails.
#[must_use]
pub fn features() -> [&'static Feature; 4] {
    [bf16(), vnni(), fp16(), amx()]
}

/// Returns a warning for each trial that could not run. In such a case, the choice of kernels, and therefore the last bits of
/// results, may differ from a run in which the trial worked.
#[must_use]
pub fn doubts() -> Vec<String> {
    features().into_iter().filter_map(doubt).collect()
}

fn doubt(feature: &Feature) -> Option<String> {
    let used = if feature.works { "used" } else { "not used" };
    feature.untried.then(|| {
        format!(
            "warning: {}: {}; it is {used}, and the last digits of results may differ from those of a run in which the test could run",
            feature.name, feature.why
        )
    })
}

/// Returns the result of the test of dot products of bf16 pairs in vectors.
pub(crate) fn bf16() -> &'static Feature {
    static FOUND: OnceLock<Feature> = OnceLock::new();
    FOUND.get_or_init(|| system::vectors("AVX512-BF16", system::has_bf16(), system::try_bf16))
}

/// Returns the result of the test of dot products of four bytes in vectors.
pub(crate) fn vnni() -> &'static Feature {
    static FOUND: OnceLock<Feature> = OnceLock::new();
    FOUND.get_or_init(|| system::vectors("AVX512-VNNI", system::has_vnni(), system::try_vnni))
}

/// Returns the result of the test of arithmetic with 16-bit floats in vectors.
fn fp16() -> &'static Feature {
    static FOUND: OnceLock<Feature> = OnceLock::new();
    FOUND.get_or_init(|| system::vectors("AVX512-FP16", system::has_fp16(), system::try_fp16))
}

/// Returns the result of the test of matrix tiles with bf16 products. Kernels that use tiles also use [`bf16`] vectors.
pub(crate) fn amx() -> &'static Feature {
    static FOUND: OnceLock<Feature> = OnceLock::new();
    FOUND.get_or_init(system::amx)
}

#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
fn feature(name: &'static str, works: bool, why: impl Into<String>) -> Feature {
    Feature { name, works, why: why.into(), untried: false }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod system {
    use super::{Feature, feature};

    pub(super) const fn has_bf16() -> bool {
        false
    }

    pub(super) const fn has_vnni() -> bool {
        false
    }

    pub(super) fn try_vnni() -> bool {
        false
    }

    pub(super) const fn has_fp16() -> bool {
        false
    }

    pub(super) fn try_bf16() -> bool {
        false
    }

    pub(super) fn try_fp16() -> bool {
        false
    }

    pub(super) fn vectors(name: &'static str, _announced: bool, _trial: fn() -> bool) -> Feature {
        feature(name, false, "not tested on this system")
    }

    pub(super) fn amx() -> Feature {
        feature("AMX", false, "not tested on this system")
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod system {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::io::Error;

    use super::{Feature, bf16, feature};
    use crate::tiles::amx::Config;

    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    /// Time limit of a trial, in seconds.
    const TRIAL_SECS: libc::c_uint = 5;

    /// Outcome of a trial.
    #[derive(Debug, PartialEq, Eq)]
    pub(super) enum Trial {
        Right,
        Wrong,
        /// Signal that killed the child.
        Signal(i32),
        /// Operating system's reason why no trial ran.
        None(String),
    }

    impl Trial {
        /// Converts the outcome to a [`Feature`]. If no trial ran, `announced` decides whether the feature is used.
        pub(super) fn verdict(self, name: &'static str, announced: bool) -> Feature {
            let said = if announced { "the CPU announces it" } else { "the CPU does not announce it" };
            match self {
                Self::Right if announced => feature(name, true, "a test product was correct"),
                Self::Right => feature(name, true, format!("{said}, but a test product was correct")),
                Self::Wrong => feature(name, false, format!("{said}, but a test product was wrong")),
                Self::Signal(signal) => {
                    let answers = [libc::SIGILL, libc::SIGSEGV, libc::SIGBUS].contains(&signal);
                    let signal = match signal {
                        libc::SIGILL => "SIGILL (illegal instruction)".to_owned(),
                        libc::SIGSEGV => "SIGSEGV".to_owned(),
                        libc::SIGBUS => "SIGBUS".to_owned(),
                        libc::SIGALRM => format!("a time limit of {TRIAL_SECS} s"),
                        other => format!("signal {other}"),
                    };
                    let why = format!("{said}, but a test ended with {signal}");
                    Feature { untried: !answers, ..feature(name, false, why) }
                }
                Self::None(why) => Feature {
                    untried: true,
                    ..feature(name, announced, format!("{said}; the test could not run: {why}"))
                },
            }
        }
    }

    /// Runs `trial` in a child process. `trial` must not allocate or take locks, because another thread of this process may hold
    /// a lock that nothing in the child would release.
    pub(super) fn tried(trial: fn() -> bool) -> Trial {
        // SAFETY: the child calls only async-signal-safe functions and the trial, and exits without running destructors.
        let child = unsafe { libc::fork() };
        if child < 0 {
            return Trial::None(format!("the child process did not start: {}", Error::last_os_error()));
        }
        if child == 0 {
            // SAFETY: as above; all pointers point to local variables.
            unsafe {
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
                for signal in [libc::SIGILL, libc::SIGSEGV, libc::SIGBUS, libc::SIGALRM] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                libc::alarm(TRIAL_SECS);
                libc::_exit(i32::from(!trial()));
            }
        }
        let mut status = 0;
        loop {
            // SAFETY: the call waits for the child and writes to a local variable.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            let error = Error::last_os_error();
            if waited == child {
                break;
            }
            if error.raw_os_error() != Some(libc::EINTR) {
                return Trial::None(format!("waiting for the child process failed: {error}"));
            }
        }
        if libc::WIFSIGNALED(status) {
            return Trial::Signal(libc::WTERMSIG(status));
        }
        if libc::WEXITSTATUS(status) == 0 { Trial::Right } else { Trial::Wrong }
    }

    pub(super) fn has_bf16() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
    }

    pub(super) fn has_vnni() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")
    }

    pub(super) fn has_fp16() -> bool {
        is_x86_feature_detected!("avx512f") && __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & 1 << 23 != 0
    }

    /// Runs a trial of vector instructions, but only if the CPU announces them. No operating system hides only these
    /// instructions.
    pub(super) fn vectors(name: &'static str, announced: bool, trial: fn() -> bool) -> Feature {
        if announced {
            tried(trial).verdict(name, true)
        } else {
            feature(name, false, "the CPU does not announce it")
        }
    }

    /// Computes `1.5 · 2 + 3 · 0.5 + 1` in every lane.
    pub(super) fn try_bf16() -> bool {
        // The bits of a bf16 are the upper half of an f32's.
        let (a, b) = ([0x4040_3fc0_u32; 16], [0x3f00_4000_u32; 16]);
        let mut c = [1.0f32; 16];
        // SAFETY: the CPU announces AVX-512, and the instructions load and store 64 bytes of each array.
        unsafe {
            asm!(
                "vmovups zmm0, [{c}]", "vmovups zmm1, [{a}]", "vmovups zmm2, [{b}]",
                "vdpbf16ps zmm0, zmm1, zmm2",
                "vmovups [{c}], zmm0", "vzeroupper",
                a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) c.as_mut_ptr(),
                out("xmm0") _, out("xmm1") _, out("xmm2") _, options(nostack),
            );
        }
        c == [5.5; 16]
    }

    /// Computes `200·−2 + 1·3 + 255·127 + 0·9 + 7` in every lane: products of unsigned and signed bytes.
    pub(super) fn try_vnni() -> bool {
        let (a, b) = ([0x00ff_01c8_u32; 16], [0x097f_03fe_u32; 16]);
        let mut c = [7i32; 16];
        // SAFETY: as in `try_bf16`.
        unsafe {
            asm!(
                "vmovups zmm0, [{c}]", "vmovups zmm1, [{a}]", "vmovups zmm2, [{b}]",
                "vpdpbusd zmm0, zmm1, zmm2",
                "vmovups [{c}], zmm0", "vzeroupper",
                a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) c.as_mut_ptr(),
                out("xmm0") _, out("xmm1") _, out("xmm2") _, options(nostack),
            );
        }
        c == [31_995; 16]
    }

    /// Computes `1.5 · 2 + 1` in every lane.
    pub(super) fn try_fp16() -> bool {
        let (a, b) = ([0x3e00_3e00_u32; 16], [0x4000_4000_u32; 16]);
        let mut c = [0x3c00_3c00_u32; 16];
        // SAFETY: as in `try_bf16`.
        unsafe {
            asm!(
                "vmovups zmm0, [{c}]", "vmovups zmm1, [{a}]", "vmovups zmm2, [{b}]",
                "vfmadd231ph zmm0, zmm1, zmm2",
                "vmovups [{c}], zmm0", "vzeroupper",
                a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) c.as_mut_ptr(),
                out("xmm0") _, out("xmm1") _, out("xmm2") _, options(nostack),
            );
        }
        c == [0x4400_4400; 16]
    }

    /// Requests permission for this process to use tiles. This changes nothing else.
    fn permission() -> Result<(), Error> {
        // SAFETY: this is a system call without pointers.
        match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } {
            0 => Ok(()),
            _ => Err(Error::last_os_error()),
        }
    }

    /// Multiplies a 16 × 32 by a 32 × 16 matrix in tiles. The child inherits its parent's permission to use tiles.
    pub(super) fn try_amx() -> bool {
        let mut config = Config::default();
        config.row_bytes[..3].fill(64);
        config.rows[..3].fill(16);
        // The left operand holds pairs (1, 1), and column `j` of the right operand holds pairs (`j`, `j`). Products of such small
        // integers are exact.
        let left = [0x3f80_3f80_u32; 256];
        let mut right = [0u32; 256];
        for (i, word) in right.iter_mut().enumerate() {
            let bits = ((i % 16) as f32).to_bits() >> 16;
            *word = bits << 16 | bits;
        }
        let mut product = [0.0f32; 256];
        // SAFETY: the instructions read and write tiles of 16 rows of 64 bytes in arrays of that size. On a CPU without
        // these instructions, a signal kills the child.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0",
                "tileloadd tmm1, [{left} + {stride}]",
                "tileloadd tmm2, [{right} + {stride}]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                "tilestored [{product} + {stride}], tmm0",
                "tilerelease",
                config = in(reg) &raw const config, left = in(reg) left.as_ptr(), right = in(reg) right.as_ptr(),
                product = in(reg) product.as_mut_ptr(), stride = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, options(nostack),
            );
        }
        product.iter().enumerate().all(|(i, &x)| x == 32.0 * (i % 16) as f32)
    }

    pub(super) fn amx() -> Feature {
        const NAME: &str = "AMX";
        const BITS: u32 = 1 << 22 | 1 << 24;
        let vectors = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
        if !vectors || !bf16().works {
            return feature(NAME, false, "its kernels also need AVX-512 with BF16, which is missing");
        }
        let most = __cpuid(0).eax;
        let bits = most >= 7 && __cpuid_count(7, 0).edx & BITS == BITS;
        // The palette must have eight tiles of 16 rows of 64 bytes.
        let palette = most >= 0x1d && {
            let leaf = __cpuid_count(0x1d, 1);
            leaf.ebx >> 16 >= 8 && leaf.ebx & 0xffff >= 64 && leaf.ecx & 0xffff >= 16
        };
        let announced = bits && palette;
        if let Err(error) = permission() {
            let said = if announced { "the CPU announces it" } else { "the CPU does not announce it" };
            return feature(
                NAME,
                false,
                format!("{said}, and the operating system does not permit tiles: {error}"),
            );
        }
        tried(try_amx).verdict(NAME, announced)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Executes an instruction that is invalid on every CPU.
        fn illegal() -> bool {
            // SAFETY: the instruction kills the child.
            unsafe { asm!("ud2", options(nomem, nostack)) };
            true
        }

        fn unmapped() -> bool {
            // SAFETY: the access is invalid on purpose and kills the child.
            unsafe { std::ptr::null::<u8>().add(1).read_volatile() == 0 }
        }

        #[test]
        fn a_refused_trial_kills_only_the_child() {
            assert_eq!(tried(illegal), Trial::Signal(libc::SIGILL));
            assert_eq!(tried(unmapped), Trial::Signal(libc::SIGSEGV));
            assert_eq!(tried(|| true), Trial::Right);
            assert_eq!(tried(|| false), Trial::Wrong);
        }

        #[test]
        fn the_trial_decides_and_says_why() {
            let refused = tried(illegal).verdict("AMX", true);
            let why = "the CPU announces it, but a test ended with SIGILL (illegal instruction)";
            assert_eq!(refused, feature("AMX", false, why));
            let hidden = Trial::Right.verdict("AMX", false);
            assert_eq!(
                hidden,
                feature("AMX", true, "the CPU does not announce it, but a test product was correct")
            );
            assert!(!Trial::Wrong.verdict("AMX", true).works);
            let untried = Trial::None("no child: busy".into());
            let untried = untried.verdict("AMX", true);
            let why = "the CPU announces it; the test could not run: no child: busy";
            assert_eq!(untried, Feature { untried: true, ..feature("AMX", true, why) });
            let hidden = Trial::None("no child: busy".into()).verdict("AMX", false);
            assert!(!hidden.works);
            assert_eq!(
                super::super::doubt(&hidden).unwrap(),
                "warning: AMX: the CPU does not announce it; the test could not run: no child: busy; it is not used, and \
                 the last digits of results may differ from those of a run in which the test could run"
            );
            assert_eq!(super::super::doubt(&refused), None);
            let slow = Trial::Signal(libc::SIGALRM).verdict("AMX", true);
            assert!(
                !slow.works
                    && super::super::doubt(&slow).unwrap().contains("a time limit of 5 s; it is not used")
            );
        }

        /// Checks that each trial also returns its expected result in this process if the instruction works.
        #[test]
        fn trials_compute_what_they_expect() {
            for (found, trial) in [
                (bf16(), try_bf16 as fn() -> bool),
                (super::super::vnni(), try_vnni),
                (super::super::fp16(), try_fp16),
                (super::super::amx(), try_amx),
            ] {
                assert!(!found.works || trial(), "{found:?}");
                assert!(!found.why.is_empty());
            }
        }
    }
}
