//! Functions of several targets.

/// Lets panics of code that reports them as errors of a file ([`omnigrpo_guard::guarded`]) pass. Any other panic is a finding.
pub fn let_guarded_panics_pass() {
    std::panic::set_hook(Box::new(|panic| {
        if !omnigrpo_guard::is_guarded() {
            eprintln!("{panic}");
            std::process::abort();
        }
    }));
}
