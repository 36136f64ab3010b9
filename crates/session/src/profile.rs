//! The table of `--profile`.

use omnigrpo_kernels::profile::Profile;

pub use omnigrpo_kernels::profile::{enable, take};

/// Returns the time by phase and kind of work, per step, and the average number of threads that worked in each phase.
pub fn table(profile: &Profile, steps: u64) -> String {
    let steps = steps.max(1) as f64;
    let mut out = format!(
        "{:22}{:>10}{:>8}{:>10}{:>9}{:>10}{:>9}\n",
        "",
        if steps > 1.0 { "s/step" } else { "s" },
        "share",
        "GFLOP",
        "GFLOP/s",
        "GB",
        "GB/s"
    );
    let total: f64 = profile.phases.iter().map(|phase| phase.time.as_secs_f64()).sum();
    for phase in &profile.phases {
        let secs = phase.time.as_secs_f64();
        let name = if phase.name.is_empty() { "outside of phases" } else { phase.name };
        let share = 100.0 * secs / total.max(f64::MIN_POSITIVE);
        out.push_str(&format!(
            "{name:22}{:>10.4}{share:>6.1} %{:>10.2} threads\n",
            secs / steps,
            phase.threads()
        ));
        let mut rest = secs;
        for entry in profile.entries.iter().filter(|e| e.phase == phase.name) {
            let t = entry.total;
            let secs = t.time.as_secs_f64();
            rest -= secs;
            let rate = |x: u64| x as f64 / 1e9 / secs.max(f64::MIN_POSITIVE);
            out.push_str(&format!(
                "  {:20}{:>10.4}{:>6.1} %{:>10.2}{:>9.1}{:>10.3}{:>9.1}\n",
                entry.op.name(),
                secs / steps,
                100.0 * secs / total.max(f64::MIN_POSITIVE),
                t.flops as f64 / 1e9 / steps,
                rate(t.flops),
                t.bytes as f64 / 1e9 / steps,
                rate(t.bytes),
            ));
        }
        let share = 100.0 * rest / total.max(f64::MIN_POSITIVE);
        out.push_str(&format!("  {:20}{:>10.4}{share:>6.1} %\n", "outside of kernels", rest / steps));
    }
    out
}
