//! Where a model runs.

use omnigrpo_gpu::Error as GpuError;
use omnigrpo_ops::{Card, Device};

use crate::problem::Problem;
use crate::settings::{DeviceChoice, Settings};

/// Opens a device; with it a few words on what it is, or why it was taken. A device that was asked for and cannot be had is an
/// error, and so is a GPU that is there and cannot be used: nothing else is taken in its place.
pub fn open_device(
    choice: DeviceChoice,
    flag: &str,
    settings: &Settings,
) -> Result<(Device, String), Problem> {
    match choice {
        DeviceChoice::Cpu => Ok((Device::Cpu, "as the settings say".into())),
        DeviceChoice::Cuda(ordinal) => {
            let (device, card) = open(ordinal, settings)
                .map_err(|error| cannot(&error).at(format!("{flag} cuda:{ordinal}")))?;
            Ok((device, card))
        }
        DeviceChoice::Auto => match omnigrpo_gpu::survey() {
            Err(error @ GpuError::NoDriver) => Ok((Device::Cpu, error.to_string())),
            Ok(survey) if survey.cards.is_empty() => Ok((Device::Cpu, no_cards(settings))),
            found => {
                let opened = found.map_err(omnigrpo_ops::Error::from).and_then(|_| open(0, settings));
                let (device, card) = opened.map_err(|error| {
                    cannot(&error).at(format!("{flag} auto")).help("`--device cpu` does without the GPU")
                })?;
                Ok((device, format!("{card}, the first GPU there is")))
            }
        },
        DeviceChoice::Emulated => match Device::emulator() {
            Some(device) => Ok((device, "a GPU's kernels on the CPU, for tests".into())),
            None => Err(Problem::usage("this build has no emulator of GPUs, which is for tests")
                .at(format!("{flag} emulated"))
                .expected("`auto`, `cpu`, `cuda`, or `cuda:N`")),
        },
    }
}

/// Why `auto` takes the CPU where there is a driver.
pub fn no_cards(settings: &Settings) -> String {
    match &settings.env.cuda_visible_devices {
        Some(visible) if visible.is_empty() => {
            "the NVIDIA driver shows no GPU, since CUDA_VISIBLE_DEVICES is empty, which hides all".into()
        }
        Some(visible) => format!("the NVIDIA driver shows no GPU, with CUDA_VISIBLE_DEVICES={visible}"),
        None => "the NVIDIA driver shows no GPU".into(),
    }
}

fn open(ordinal: u16, settings: &Settings) -> omnigrpo_ops::Result<(Device, String)> {
    let card =
        Card::open(ordinal.into(), &settings.env.cuda_folders, &settings.env.cache_dir.join("kernels"))?;
    Ok((Device::Gpu(card), card.name()))
}

fn cannot(error: &omnigrpo_ops::Error) -> Problem {
    Problem::failure("the GPU cannot be used").got(error.to_string())
}

/// Whether `device` is what `choice` names.
pub fn is_at(device: Device, choice: DeviceChoice) -> bool {
    match (device, choice) {
        (Device::Cpu, DeviceChoice::Cpu) => true,
        (Device::Gpu(card), DeviceChoice::Cuda(ordinal)) => card.ordinal() == Some(ordinal.into()),
        (Device::Gpu(card), DeviceChoice::Emulated) => card.ordinal().is_none(),
        _ => false,
    }
}
