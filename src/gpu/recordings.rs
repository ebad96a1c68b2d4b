//! Steps of decode that were made ready once: their launches, and the graph of them.

use std::collections::BTreeMap;

use super::driver::{Call, Graph};
use crate::{error::Result, plan::Ending};

/// Most steps that are kept. A load that changes its number of sequences all the time passes through as many as there may
/// be, each some hundred launches; making one anew takes about as long as it runs.
const MOST: usize = 32;

/// Rows, and what follows the last layer: all that launches depend on.
pub(super) type Key = (usize, Ending);

/// A step, ready to run.
pub(super) struct Recorded {
    // Dropped before what its addresses lie in, by whoever holds them all.
    pub graph: Option<Graph>,
    pub calls: Vec<Call>,
    /// When it ran last.
    used: u64,
}

/// The steps that ran last.
#[derive(Default)]
pub(super) struct Recordings {
    steps: BTreeMap<Key, Recorded>,
    /// Steps that ran.
    clock: u64,
}

impl Recordings {
    /// The step `key`, of the launches that `make` gives if it is not kept. One that ran longest ago makes room for it.
    pub fn get(&mut self, key: Key, make: impl FnOnce() -> Result<Vec<Call>>) -> Result<&mut Recorded> {
        self.clock += 1;
        if !self.steps.contains_key(&key) {
            let calls = make()?;
            if self.steps.len() == MOST {
                let oldest = self.steps.iter().min_by_key(|(_, step)| step.used).map(|(&key, _)| key);
                oldest.and_then(|key| self.steps.remove(&key));
            }
            self.steps.insert(key, Recorded { graph: None, calls, used: 0 });
        }
        let step = self.steps.get_mut(&key).expect("it was there or is now");
        step.used = self.clock;
        Ok(step)
    }

    /// Forgets graphs, which hold how their kernels are launched.
    pub fn forget_graphs(&mut self) {
        for step in self.steps.values_mut() {
            step.graph = None;
        }
    }
}
