//! Marks in the stream.

use cudarc::driver::{result, sys};

use super::{Device, failed};
use crate::error::Result;

/// A point in the stream that the host can wait for, and measure from.
pub struct Event {
    raw: sys::CUevent,
    device: Device,
}

impl Device {
    /// An event that was not recorded yet. With `timing` it can be given to [`Event::elapsed_us`].
    pub fn event(&self, timing: bool) -> Result<Event> {
        use sys::CUevent_flags::{CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING};
        let flags = if timing { CU_EVENT_DEFAULT } else { CU_EVENT_DISABLE_TIMING };
        let raw = result::event::create(flags).map_err(failed("creating an event"))?;
        Ok(Event { raw, device: self.clone() })
    }
}

impl Event {
    /// Moves it behind all work queued so far.
    pub fn record(&self) -> Result<()> {
        // SAFETY: event and stream live as long as `self`.
        unsafe { result::event::record(self.raw, self.device.stream()) }.map_err(failed("recording an event"))
    }

    /// Waits until the work ahead of it has ended; `what` names that work, whose errors come out here.
    pub fn wait(&self, what: &str) -> Result<()> {
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.raw) }.map_err(failed(what))
    }

    /// Microseconds from `start` to this one; both were recorded and waited for.
    pub fn elapsed_us(&self, start: &Self) -> Result<f64> {
        // SAFETY: both events live, on the same device.
        let ms = unsafe { result::event::elapsed(start.raw, self.raw) }.map_err(failed("reading an event"))?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created and destroyed once.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}
