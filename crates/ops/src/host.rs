//! Values that the host creates and devices read: layouts, indices, targets, tables.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::Device;

type Copies = Mutex<Vec<(Device, Arc<dyn Any + Send + Sync>)>>;

/// A value on the host, with copies in the form that each device needs. A copy is created at its first use. The value is created
/// once per stream, and every layer reads it.
pub struct Host<T> {
    value: T,
    copies: Copies,
}

impl<T> Host<T> {
    /// Creates a value without copies for devices.
    pub fn new(value: T) -> Self {
        Self { value, copies: Mutex::default() }
    }

    /// Creates a value for which `copy`, the copy for `device`, already exists.
    pub(crate) fn given<C: Send + Sync + 'static>(value: T, device: Device, copy: C) -> Self {
        let copy: Arc<dyn Any + Send + Sync> = Arc::new(copy);
        Self { value, copies: Mutex::new(vec![(device, copy)]) }
    }

    /// Returns the copy for `device`. The first call for a device creates it with `make`. There is one copy of each type per device.
    pub(crate) fn on<C: Send + Sync + 'static>(&self, device: Device, make: impl FnOnce(&T) -> C) -> Arc<C> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let mut here = copies.iter().filter(|(on, _)| *on == device);
        if let Some(copy) = here.find_map(|(_, copy)| Arc::clone(copy).downcast().ok()) {
            return copy;
        }
        let copy = Arc::new(make(&self.value));
        copies.push((device, Arc::clone(&copy) as Arc<dyn Any + Send + Sync>));
        copy
    }
}

impl<T> Deref for Host<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> From<T> for Host<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T: Clone> Clone for Host<T> {
    fn clone(&self) -> Self {
        Self::new(self.value.clone())
    }
}

impl<T: Default> Default for Host<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: PartialEq> PartialEq for Host<T> {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T: fmt::Debug> fmt::Debug for Host<T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.value.fmt(f)
    }
}
