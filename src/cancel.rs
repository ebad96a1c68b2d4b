//! A flag that asks long work to stop.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::error::{Error, Result};

/// Shared by whoever may stop the work and whoever does it; every copy is the same flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    flag: Arc<AtomicBool>,
    parent: Option<Arc<AtomicBool>>,
}

impl Cancel {
    /// A flag of its own that is also set when this one is. Only this flag's own part is inherited: a child of a child
    /// does not hear of the first.
    #[must_use]
    pub fn child(&self) -> Self {
        Self { flag: Arc::default(), parent: Some(Arc::clone(&self.flag)) }
    }

    /// Asks the work to stop. It does so at its next check, without a result.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Whether someone asked.
    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::Relaxed) || self.parent.as_ref().is_some_and(|parent| parent.load(Ordering::Relaxed))
    }

    /// [`Error::Cancelled`] once someone asked; shaped for `?`. Work that takes seconds calls this every few milliseconds.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}
