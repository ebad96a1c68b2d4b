//! A flag that asks long work to stop.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::error::{Error, Result};

/// Shared by whoever may stop the work and whoever does it; every copy is the same flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<Flag>);

#[derive(Debug, Default)]
struct Flag {
    set: AtomicBool,
    parent: Option<Cancel>,
}

impl Cancel {
    /// A flag of its own that is also set when this one is.
    #[must_use]
    pub fn child(&self) -> Self {
        Self(Arc::new(Flag { set: AtomicBool::default(), parent: Some(self.clone()) }))
    }

    /// Asks the work to stop. It does so at its next check, without a result.
    pub fn cancel(&self) {
        self.0.set.store(true, Ordering::Relaxed);
    }

    /// Whether someone asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.set.load(Ordering::Relaxed) || self.0.parent.as_ref().is_some_and(Self::is_cancelled)
    }

    /// [`Error::Cancelled`] once someone asked; shaped for `?`. Work that takes seconds calls this every few milliseconds.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_hears_of_all_above_it_and_no_one_of_it() {
        let top = Cancel::default();
        let (middle, other) = (top.child(), top.child());
        let low = middle.child();
        middle.cancel();
        assert!(low.check().is_err() && !top.is_cancelled() && !other.is_cancelled());
        top.cancel();
        assert!(other.is_cancelled());
    }
}
