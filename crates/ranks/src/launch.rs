//! Recognition of the launcher that started a process, and `mpirun` as a launcher.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Error, PARENT, Ranks, Result};

/// Program that started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// None: one process.
    None,
    /// `mpirun` of Open MPI, or `srun --mpi=pmix`.
    OpenMpi,
    /// `mpiexec` of MPICH and its relatives, or `srun --mpi=pmi2`.
    Mpich,
    /// `torchrun`, `accelerate launch` or `deepspeed`. They start processes but provide no MPI.
    Torch,
}

/// This process among those that a launcher started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Program that started the processes.
    pub launcher: Launcher,
    /// Number of this process.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Number of this process on its machine, according to `torchrun` and its relatives; otherwise 0.
    pub local_rank: usize,
    /// Number of processes on this machine, according to `torchrun` and its relatives; otherwise all.
    pub local_size: usize,
    /// Number of the process that started `mpirun` and waits for it, if that is this program ([`Mpirun::command`]).
    pub parent: Option<u32>,
}

/// Variables of a launcher: number of processes, number of this process.
type Row = (Launcher, &'static str, &'static str);

/// Launchers in the order in which they are recognised. MPI launchers precede others whose variables a job may set as well.
const ROWS: [Row; 3] = [
    (Launcher::OpenMpi, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    (Launcher::Mpich, "PMI_SIZE", "PMI_RANK"),
    (Launcher::Torch, "WORLD_SIZE", "RANK"),
];

impl Launch {
    /// Reads the variables of launchers through `get`.
    ///
    /// # Errors
    /// Returns an error if variables contradict each other, or if `srun` started several processes without an MPI.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |variable: &'static str| -> Result<Option<usize>> {
            let Some(value) = get(variable).filter(|value| !value.trim().is_empty()) else { return Ok(None) };
            value.trim().parse().map(Some).map_err(|_| Error::Variable {
                variable,
                got: format!("{value:?}"),
                expected: "a number".to_owned(),
            })
        };
        let place = |size_name: &'static str, rank_name: &'static str| -> Result<Option<(usize, usize)>> {
            let Some(size) = number(size_name)?.filter(|&size| size > 1) else { return Ok(None) };
            match number(rank_name)? {
                Some(rank) if rank < size => Ok(Some((rank, size))),
                rank => Err(Error::Variable {
                    variable: rank_name,
                    got: rank.map_or("no value".to_owned(), |rank| rank.to_string()),
                    expected: format!("a number below {size}, the value of {size_name}"),
                }),
            }
        };
        let parent = get(PARENT).and_then(|id| id.trim().parse().ok());
        for (launcher, size, rank) in ROWS {
            let Some((rank, size)) = place(size, rank)? else { continue };
            let (mut local_rank, mut local_size) = (0, size);
            if launcher == Launcher::Torch {
                local_rank = number("LOCAL_RANK")?.unwrap_or(rank);
                // `deepspeed` sets the second name.
                let of_machine = number("LOCAL_WORLD_SIZE")?.or(number("LOCAL_SIZE")?);
                if of_machine.is_none() && local_rank != rank {
                    return Err(Error::Variable {
                        variable: "LOCAL_WORLD_SIZE",
                        got: "no value".to_owned(),
                        expected: format!(
                            "the processes of this machine: RANK is {rank}, LOCAL_RANK {local_rank}"
                        ),
                    });
                }
                local_size = of_machine.unwrap_or(size);
            }
            return Ok(Self { launcher, rank, size, local_rank, local_size, parent });
        }
        // The shell of a Slurm job has some of these variables as well, but its step has one task.
        let Some((rank, size)) = place("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")? else {
            let (launcher, rank, size) = (Launcher::None, 0, 1);
            return Ok(Self { launcher, rank, size, local_rank: 0, local_size: 1, parent });
        };
        if get("PMIX_RANK").is_none() {
            return Err(Error::Launcher {
                what: format!("srun started {size} processes without an MPI that connects them"),
                line: "srun --mpi=pmix …` (Open MPI) or `srun --mpi=pmi2 …".to_owned(),
            });
        }
        Ok(Self { launcher: Launcher::OpenMpi, rank, size, local_rank: 0, local_size: size, parent })
    }

    /// Connects the processes of an MPI launcher. A single process is the only rank and needs no MPI.
    ///
    /// # Errors
    /// Returns an error if no library of MPI can be loaded, or if it does not belong to the launcher. Processes of `torchrun` and
    /// its relatives cannot be connected: one of them starts [`Mpirun`] instead.
    pub fn connect(&self) -> Result<Ranks> {
        match self.launcher {
            Launcher::None => Ok(Ranks::default()),
            #[cfg(unix)]
            Launcher::OpenMpi | Launcher::Mpich => {
                Ok(Ranks::new(crate::Mpi::connect(self.launcher, self.size)?))
            }
            _ => Err(Error::Launcher {
                what: format!(
                    "the launcher started {} processes without an MPI that connects them",
                    self.size
                ),
                line: format!("mpirun -n {} …", self.size),
            }),
        }
    }
}

/// An `mpirun` of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mpirun {
    program: PathBuf,
    /// MPI that the program belongs to.
    launcher: Launcher,
}

impl Mpirun {
    /// Finds `mpirun` or `mpiexec` in the folders of `path`, the value of `PATH`.
    ///
    /// # Errors
    /// Returns an error if there is none that can be run.
    pub fn find(path: &str) -> Result<Self> {
        let folders = path.split(':').filter(|folder| !folder.is_empty());
        let programs =
            folders.flat_map(|folder| ["mpirun", "mpiexec"].map(|name| Path::new(folder).join(name)));
        if let Some(found) = programs.filter(|program| program.is_file()).find_map(Self::at) {
            return Ok(found);
        }
        Err(Error::NoMpirun)
    }

    /// Returns the `mpirun` at a path; `None` if it does not belong to a known MPI.
    pub fn at(program: PathBuf) -> Option<Self> {
        let asked = Command::new(&program).arg("--version").stdin(Stdio::null()).output().ok()?;
        let launcher = family(&String::from_utf8_lossy(&asked.stdout))?;
        Some(Self { program, launcher })
    }

    /// Returns the command that starts `program` with `arguments` as `size` ranks on this machine. Its processes may use all
    /// cores. They know the number of this process, which has to wait for the command ([`Launch::parent`]).
    pub fn command(&self, size: usize, program: &Path, arguments: &[std::ffi::OsString]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("-n").arg(size.to_string());
        if self.launcher == Launcher::OpenMpi {
            // By default, Open MPI binds each of two ranks to one core, and refuses root and more ranks than cores.
            let root = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];
            command.args(["--bind-to", "none", "--oversubscribe"]).envs(root.map(|name| (name, "1")));
        }
        command.arg(program).args(arguments).stdin(Stdio::null());
        command.env(PARENT, std::process::id().to_string());
        command
    }
}

/// Returns the MPI of an `mpirun` from the text that it prints for `--version`.
fn family(version: &str) -> Option<Launcher> {
    let names = [
        (Launcher::OpenMpi, ["Open MPI", "OpenRTE", "PRTE"]),
        (Launcher::Mpich, ["HYDRA", "MPICH", "Intel(R) MPI"]),
    ];
    let is_known = |names: &[&str; 3]| names.iter().any(|name| version.contains(name));
    names.into_iter().find_map(|(launcher, names)| is_known(&names).then_some(launcher))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Launch> {
        Launch::read(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn launchers_are_recognised_by_their_variables() {
        const ALONE: Launch =
            Launch { launcher: Launcher::None, rank: 0, size: 1, local_rank: 0, local_size: 1, parent: None };
        let place = |launcher, rank, size| Launch {
            launcher,
            rank,
            size,
            local_rank: 0,
            local_size: size,
            parent: None,
        };
        let open = place(Launcher::OpenMpi, 3, 4);
        let torch = Launch { local_rank: 1, local_size: 4, ..place(Launcher::Torch, 5, 8) };
        for (variables, expected) in [
            (&[][..], ALONE),
            (&[("WORLD_SIZE", "1"), ("RANK", "0")], ALONE),
            // `mpirun -n 1`.
            (&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")], ALONE),
            // The shell of a Slurm job with 16 tasks, and a step with one.
            (&[("SLURM_NTASKS", "16"), ("SLURM_PROCID", "0")], ALONE),
            (&[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"), ("PMIX_RANK", "0")], ALONE),
            (&[("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")], open.clone()),
            // A job script may set the variables of torchrun and start mpirun, within Slurm.
            (
                &[
                    ("WORLD_SIZE", "2"),
                    ("SLURM_STEP_NUM_TASKS", "2"),
                    ("SLURM_PROCID", "1"),
                    ("OMPI_COMM_WORLD_SIZE", "4"),
                    ("OMPI_COMM_WORLD_RANK", "3"),
                ],
                open.clone(),
            ),
            (&[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "3"), ("PMIX_RANK", "3")], open),
            (&[("PMI_SIZE", "2"), ("PMI_RANK", "1"), ("MPI_LOCALRANKID", "1")], place(Launcher::Mpich, 1, 2)),
            (
                &[("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1"), ("PMI_SIZE", "2"), ("PMI_RANK", "1")],
                place(Launcher::Mpich, 1, 2),
            ),
            (
                &[
                    ("WORLD_SIZE", "8"),
                    ("RANK", "5"),
                    ("LOCAL_RANK", "1"),
                    ("LOCAL_WORLD_SIZE", "4"),
                    ("MASTER_ADDR", "a"),
                ],
                torch.clone(),
            ),
            (&[("WORLD_SIZE", "8"), ("RANK", "5"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "4")], torch),
        ] {
            assert_eq!(read(variables).unwrap(), expected, "{variables:?}");
        }
    }

    #[test]
    fn a_rank_knows_the_process_that_waits_for_mpirun() {
        let of_mpirun = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "1")];
        let parent = |id| read(&[of_mpirun[0], of_mpirun[1], (PARENT, id)]).unwrap().parent;
        assert_eq!([parent("42"), parent("none"), read(&of_mpirun).unwrap().parent], [Some(42), None, None]);
        let command = Mpirun { program: "mpirun".into(), launcher: Launcher::Mpich };
        let command = command.command(2, Path::new("omnigrpo"), &[]);
        let own = std::process::id().to_string();
        assert!(command.get_envs().any(|(name, value)| name == PARENT && value == Some(own.as_ref())));
    }

    #[test]
    fn a_launcher_that_cannot_work_gets_the_line_to_type() {
        let told = |variables: &[(&str, &str)]| read(variables).unwrap_err().to_string();
        let srun = told(&[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "3")]);
        assert!(srun.contains("4 processes") && srun.contains("srun --mpi=pmix"), "{srun}");
        let rank = told(&[("WORLD_SIZE", "2")]);
        assert!(rank.contains("RANK") && rank.contains("no value") && rank.contains("WORLD_SIZE"), "{rank}");
        let local = told(&[("WORLD_SIZE", "4"), ("RANK", "2"), ("LOCAL_RANK", "0")]);
        assert!(
            local.contains("LOCAL_WORLD_SIZE: got no value, expected the processes of this machine"),
            "{local}"
        );
        let high = told(&[("PMI_SIZE", "2"), ("PMI_RANK", "2")]);
        assert!(high.contains("PMI_RANK: got 2, expected a number below 2"), "{high}");
        let word = told(&[("OMPI_COMM_WORLD_SIZE", "two"), ("OMPI_COMM_WORLD_RANK", "0")]);
        assert!(word.contains("OMPI_COMM_WORLD_SIZE: got \"two\""), "{word}");
        let torch = read(&[("WORLD_SIZE", "2"), ("RANK", "0")]).unwrap().connect().unwrap_err().to_string();
        assert!(torch.contains("mpirun -n 2"), "{torch}");
    }

    #[test]
    fn an_mpirun_is_told_apart_by_its_version() {
        for (text, expected) in [
            (
                "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
                Some(Launcher::OpenMpi),
            ),
            (
                "HYDRA build details:\n    Version:                                 4.0.2\n",
                Some(Launcher::Mpich),
            ),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.13", Some(Launcher::Mpich)),
            ("jsrun 10.3", None),
        ] {
            assert_eq!(family(text), expected, "{text}");
        }
        let none = Mpirun::find("/nonexistent:").unwrap_err().to_string();
        assert!(none.contains("apt install openmpi-bin"), "{none}");
    }

    #[test]
    fn mpirun_gets_the_arguments_of_its_family() {
        let line = |launcher| {
            let command = Mpirun { program: "mpirun".into(), launcher }.command(
                2,
                Path::new("omnigrpo"),
                &["train".into(), "--seed".into(), "1".into()],
            );
            let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
            words.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line(Launcher::Mpich), "-n 2 omnigrpo train --seed 1");
        assert_eq!(line(Launcher::OpenMpi), "-n 2 --bind-to none --oversubscribe omnigrpo train --seed 1");
    }
}
