//! Devices of models.

use std::path::Path;

use omnigrpo_gpu::Error as GpuError;
use omnigrpo_ops::{Card, Device};
use omnigrpo_ranks::Local;

use omnigrpo_settings::problem::Problem;
use omnigrpo_settings::{DeviceChoice, Settings};

/// Returns the device of one of several processes on a machine, if cards are used: the card with its number, or the only card
/// that the launcher lets the process see.
pub fn card_of(choice: DeviceChoice, local: Local) -> DeviceChoice {
    let cards = || omnigrpo_gpu::survey().map_or(0, |survey| survey.cards.len());
    let card = |cards| match cards {
        1 => DeviceChoice::Cuda(0),
        _ => u16::try_from(local.rank).map_or(choice, DeviceChoice::Cuda),
    };
    match (choice, cards) {
        (DeviceChoice::Cuda(_), cards) => card(cards()),
        (DeviceChoice::Auto, cards) if cards() > 0 => card(cards()),
        (other, _) => other,
    }
}

/// Opens a device. Returns it with a short description of the device or of the reason for choosing it. The description is empty
/// for a
/// CPU that the user chose or that is the machine's only device.
///
/// # Errors
/// Returns an error if the device is unavailable, or `auto` finds a GPU that cannot be used. No other device replaces it.
pub fn open_device(
    choice: DeviceChoice,
    flag: &str,
    settings: &Settings,
) -> Result<(Device, String), Problem> {
    match choice {
        DeviceChoice::Cpu => Ok((Device::Cpu, String::new())),
        DeviceChoice::Cuda(ordinal) => {
            let (device, card) = open(ordinal, settings)
                .map_err(|error| cannot(&error).at(format!("{flag} cuda:{ordinal}")))?;
            Ok((device, card))
        }
        DeviceChoice::Auto => match omnigrpo_gpu::survey() {
            Err(error @ GpuError::NoDriver) => {
                Ok((Device::Cpu, if has_nvidia_gpu() { error.to_string() } else { String::new() }))
            }
            Ok(survey) if survey.cards.is_empty() => Ok((Device::Cpu, no_cards(settings))),
            found => {
                let opened = found.map_err(omnigrpo_ops::Error::from).and_then(|_| open(0, settings));
                let (device, card) = opened.map_err(|error| {
                    cannot(&error).at(format!("{flag} auto")).help("`--device cpu` needs no GPU")
                })?;
                Ok((device, format!("{card}, the first GPU")))
            }
        },
        DeviceChoice::Emulated => match Device::emulator() {
            Some(device) => Ok((device, "a GPU's kernels on the CPU, for tests".into())),
            None => Err(Problem::usage("this build has no GPU emulator, which only test builds have")
                .at(format!("{flag} emulated"))
                .expected("`auto`, `cpu`, `cuda`, or `cuda:N`")),
        },
    }
}

/// Returns true if this machine's PCI bus lists an NVIDIA display or compute card.
pub fn has_nvidia_gpu() -> bool {
    lists_nvidia_gpu(Path::new("/sys/bus/pci/devices"))
}

/// Returns true if the PCI bus lists an NVIDIA display or compute card. `devices` is the kernel's list: a directory per device
/// with the files `vendor` and `class`.
fn lists_nvidia_gpu(devices: &Path) -> bool {
    let is_gpu = |device: &Path| {
        let reads = |file: &str, start: &str| {
            std::fs::read_to_string(device.join(file)).is_ok_and(|text| text.starts_with(start))
        };
        reads("vendor", "0x10de") && reads("class", "0x03")
    };
    let Ok(entries) = std::fs::read_dir(devices) else { return false };
    entries.flatten().any(|entry| is_gpu(&entry.path()))
}

/// Returns the reason why `auto` selects the CPU although a driver is installed.
pub fn no_cards(settings: &Settings) -> String {
    match &settings.env.cuda_visible_devices {
        Some(visible) if visible.is_empty() => {
            "the NVIDIA driver shows no GPU, since CUDA_VISIBLE_DEVICES is empty, which hides all GPUs".into()
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

/// Returns true if `choice` names `device`.
pub fn is_at(device: Device, choice: DeviceChoice) -> bool {
    match (device, choice) {
        (Device::Cpu, DeviceChoice::Cpu) => true,
        (Device::Gpu(card), DeviceChoice::Cuda(ordinal)) => card.ordinal() == Some(ordinal.into()),
        (Device::Gpu(card), DeviceChoice::Emulated) => card.ordinal().is_none(),
        _ => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_a_display_controller_of_nvidia() {
        let bus = tempfile::tempdir().unwrap();
        let add = |name: &str, vendor: &str, class: &str| {
            let device = bus.path().join(name);
            std::fs::create_dir(&device).unwrap();
            std::fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            std::fs::write(device.join("class"), format!("{class}\n")).unwrap();
        };
        assert!(!lists_nvidia_gpu(&bus.path().join("none")));
        add("0000:00:02.0", "0x8086", "0x030000");
        add("0000:01:00.1", "0x10de", "0x040300");
        assert!(!lists_nvidia_gpu(bus.path()), "a display of Intel and the sound of a card");
        add("0000:01:00.0", "0x10de", "0x030200");
        assert!(lists_nvidia_gpu(bus.path()));
    }
}
