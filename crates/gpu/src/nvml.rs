//! Health and load of a card, from NVIDIA's management library. The library belongs to the driver; without it, nothing is known.

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
        nvmlDeviceGetUtilizationRates(*mut c_void, *mut Rates) -> c_int;
        nvmlDeviceGetMemoryInfo(*mut c_void, *mut Memory) -> c_int;
    }
}

/// NVML's `nvmlUtilization_t`: percent of a recent period in which a kernel ran, and in which memory was read or written.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Rates {
    gpu: c_uint,
    memory: c_uint,
}

/// NVML's `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
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
    match Monitor::open(bus) {
        // SAFETY: the monitor has initialised NVML for this device.
        Ok(own) => unsafe { facts(&own.functions, own.device) },
        Err(why) => vec![("health", Ok(format!("unknown, since {why}")))],
    }
}

/// Load of a card. What NVML does not report, for example of a part of a card (MIG), is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Percent of the last second, or less, in which a kernel ran.
    pub busy_percent: Option<u32>,
    /// Bytes of memory in use by all processes, and of all memory.
    pub memory: Option<[u64; 2]>,
}

/// Connection to NVML about one card.
pub struct Monitor {
    functions: Functions,
    device: *mut c_void,
}

// SAFETY: NVML may be called from any thread, and the handle is not tied to one.
unsafe impl Send for Monitor {}

impl Monitor {
    /// Connects to NVML about the card at an address of the PCI bus. The error is a clause that says what is missing.
    pub(crate) fn open(bus: &str) -> Result<Self, &'static str> {
        // SAFETY: the library's initialisers have no preconditions.
        let library = unsafe { libloading::Library::new("libnvidia-ml.so.1") };
        let library = library.map_err(|_| "libnvidia-ml was not found")?;
        let lacking = "libnvidia-ml lacks functions";
        let functions = Functions::bind(&library).map_err(|_| lacking)?;
        let bus = CString::new(bus).map_err(|_| lacking)?;
        // Functions are called as long as the process runs.
        std::mem::forget(library);
        let unknown = "libnvidia-ml does not know this GPU";
        // SAFETY: the function has no preconditions.
        if unsafe { (functions.nvmlInit_v2)() } != 0 {
            return Err(unknown);
        }
        let mut own = Self { functions, device: std::ptr::null_mut() };
        // SAFETY: both addresses are valid, and the library is initialised.
        let code = unsafe { (functions.nvmlDeviceGetHandleByPciBusId_v2)(bus.as_ptr(), &raw mut own.device) };
        if code == 0 { Ok(own) } else { Err(unknown) }
    }

    /// Returns the load of the card at this moment.
    pub fn load(&self) -> Load {
        let (mut rates, mut memory) = (Rates::default(), Memory::default());
        // SAFETY: NVML is initialised, the device is one of its handles, and both addresses are valid.
        let codes = unsafe {
            [
                (self.functions.nvmlDeviceGetUtilizationRates)(self.device, &raw mut rates),
                (self.functions.nvmlDeviceGetMemoryInfo)(self.device, &raw mut memory),
            ]
        };
        Load {
            busy_percent: (codes[0] == 0).then_some(rates.gpu),
            memory: (codes[1] == 0).then_some([memory.used, memory.total]),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // SAFETY: the library is initialised. It counts how often.
        let _ = unsafe { (self.functions.nvmlShutdown)() };
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
