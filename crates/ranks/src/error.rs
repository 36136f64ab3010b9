//! Errors between ranks.

use omnigrpo_guard::Fault;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A launcher's variable that is missing or has an unusable value.
    #[error(
        "{variable}: got {got}, expected {expected}; start the run with a launcher, or unset its variables"
    )]
    Variable {
        /// Name of the variable.
        variable: &'static str,
        /// Value of the variable.
        got: String,
        /// Description of a usable value.
        expected: String,
    },
    /// A launcher whose processes cannot be connected.
    #[error("{what}; start the run with `{line}`")]
    Launcher {
        /// Reason.
        what: String,
        /// Command line that works.
        line: String,
    },
    /// No `mpirun` that can be run.
    #[error(
        "several processes need an MPI, and PATH has no mpirun of Open MPI, MPICH or Intel MPI; install one \
         (`apt install openmpi-bin`, `apt install mpich` or `pip install mpich`)"
    )]
    NoMpirun,
    /// No library of the engine that can be loaded.
    #[error(
        "no MPI library can be loaded ({tried}); install Open MPI or MPICH, or set {variable} to the path of a library"
    )]
    NoLibrary {
        /// File names, each with the message of the loader.
        tried: String,
        /// Variable that names a library.
        variable: &'static str,
    },
    /// A library that does not know the processes of the launcher.
    #[error(
        "the launcher started {launched} processes, but {engine} connects {connected}: it belongs to another MPI than the \
         launcher; use the launcher of {engine}, or set {variable} to the library of the launcher"
    )]
    OtherMpi {
        /// Number of processes according to the launcher.
        launched: usize,
        /// Name of the library.
        engine: String,
        /// Number of processes according to the library.
        connected: usize,
        /// Variable that names a library.
        variable: &'static str,
    },
    /// A call of the engine that failed.
    #[error("{call} failed: {what}")]
    Engine {
        /// Name of the call.
        call: &'static str,
        /// Message of the engine.
        what: String,
    },
    /// Arguments with the wrong number of elements.
    #[error("{call}: got {got} {unit}, expected {expected}")]
    Size {
        /// Name of the call.
        call: &'static str,
        /// Number of elements.
        got: usize,
        /// Unit of the numbers.
        unit: &'static str,
        /// Required number of elements.
        expected: usize,
    },
    /// Data of another rank that cannot be read.
    #[error("the data of rank {rank} cannot be read: {what}; run the same program on all ranks")]
    Unreadable {
        /// Number of the rank.
        rank: usize,
        /// Reason.
        what: String,
    },
    /// Failure of another rank.
    #[error("rank {rank}: {what}")]
    Other {
        /// Number of the rank.
        rank: usize,
        /// Message of its error.
        what: String,
        /// Cause of its error.
        fault: Fault,
    },
    /// The connections that watch over the ranks cannot be made.
    #[error("{what}; if the first rank has another address for the other machines, set `rank_address`")]
    Lifeline {
        /// Problem.
        what: String,
    },
}
