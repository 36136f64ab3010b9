//! Health of a card, from NVIDIA's management library. The library belongs to the driver; without it, nothing is known.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::libraries::functions;

functions! {
    /// Functions of NVML. All return 0 if they succeed.
    Functions {
        nvmlInit_v2() -> c_int;
        nvmlShutdown() -> c_int;
        nvmlSystemGetDriverVersion(*mut c_char, c_uint) -> c_int;
        nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut *mut c_void) -> c_int;
        nvmlDeviceGetMigMode(*mut c_void, *mut c_uint, *mut c_uint) -> c_int;
        nvmlDeviceGetTotalEccErrors(*mut c_void, c_int, c_int, *mut c_ulonglong) -> c_int;
        nvmlDeviceGetCurrentClocksThrottleReasons(*mut c_void, *mut c_ulonglong) -> c_int;
        nvmlDeviceGetTemperature(*mut c_void, c_int, *mut c_uint) -> c_int;
    }
}

/// NVML's values for uncorrected errors, since the driver was loaded, and for the temperature of the GPU.
const UNCORRECTED: c_int = 1;
const VOLATILE: c_int = 0;
const OF_THE_GPU: c_int = 0;

/// Reasons for lower clocks that indicate a problem, as bits, with their names. Idle clocks and limits by the user are none.
const SLOWED: [(c_ulonglong, &str); 4] = [
    (0x8, "the hardware slows down"),
    (0x20, "its temperature is too high"),
    (0x40, "its temperature is far too high"),
    (0x80, "its power supply is insufficient"),
];

/// A fact about a card, or a problem.
pub(crate) type Fact = (&'static str, Result<String, String>);

/// Returns facts about the card at an address of the PCI bus.
pub(crate) fn health(bus: &str) -> Vec<Fact> {
    // SAFETY: the library's initialisers have no preconditions.
    let Ok(library) = (unsafe { libloading::Library::new("libnvidia-ml.so.1") }) else {
        return vec![("health", Ok("unknown, since libnvidia-ml was not found".into()))];
    };
    let (Ok(f), Ok(bus)) = (Functions::bind(&library), CString::new(bus)) else {
        return vec![("health", Ok("unknown, since libnvidia-ml lacks functions".into()))];
    };
    std::mem::forget(library);
    // SAFETY: all addresses are valid, and the text has the given length. The library is initialised first.
    unsafe {
        let mut device = std::ptr::null_mut();
        if (f.nvmlInit_v2)() != 0 || (f.nvmlDeviceGetHandleByPciBusId_v2)(bus.as_ptr(), &raw mut device) != 0
        {
            return vec![("health", Ok("unknown, since libnvidia-ml does not know this GPU".into()))];
        }
        let facts = facts(&f, device);
        let _ = (f.nvmlShutdown)();
        facts
    }
}

/// # Safety
/// NVML must be initialised, and the device must be one of its handles.
unsafe fn facts(f: &Functions, device: *mut c_void) -> Vec<Fact> {
    let mut all: Vec<Fact> = Vec::new();
    // SAFETY: the caller's promise; all addresses are valid.
    unsafe {
        let mut text = [0u8; 80];
        if (f.nvmlSystemGetDriverVersion)(text.as_mut_ptr().cast(), 80) == 0 {
            let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
            all.push(("driver", Ok(String::from_utf8_lossy(&text[..end]).into_owned())));
        }
        let (mut now, mut pending) = (0, 0);
        if (f.nvmlDeviceGetMigMode)(device, &raw mut now, &raw mut pending) == 0 && now == 1 {
            all.push(("division", Ok("MIG is on: this is a part of a GPU".into())));
        }
        let mut errors = 0;
        if (f.nvmlDeviceGetTotalEccErrors)(device, UNCORRECTED, VOLATILE, &raw mut errors) == 0 {
            let text = format!("{errors} uncorrected errors of memory since the driver was loaded");
            let more = "; numbers may be wrong: restart the machine, and replace the GPU if errors return";
            all.push(("memory errors", if errors == 0 { Ok(text) } else { Err(text + more) }));
        }
        let (mut reasons, mut degrees) = (0, 0);
        if (f.nvmlDeviceGetCurrentClocksThrottleReasons)(device, &raw mut reasons) == 0 {
            let slowed: Vec<&str> =
                SLOWED.iter().filter(|(bit, _)| reasons & bit != 0).map(|(_, text)| *text).collect();
            let known = (f.nvmlDeviceGetTemperature)(device, OF_THE_GPU, &raw mut degrees) == 0;
            let at = if known { format!("{degrees} °C") } else { "temperature unknown".into() };
            all.push((
                "clocks",
                match slowed.is_empty() {
                    true => Ok(format!("not reduced, {at}")),
                    false => Err(format!("reduced, since {}; {at}", slowed.join(" and "))),
                },
            ));
        }
    }
    all
}
