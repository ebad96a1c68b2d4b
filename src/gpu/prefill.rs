//! Prompts: many tokens of one sequence whose next token is not chosen.

use super::{GpuModel, SequenceId};
use crate::{cancel::Cancel, error::Result};

/// Tokens between two looks at the cancel flag.
const CHECK_TOKENS: usize = 64;

impl GpuModel {
    /// Appends `tokens` to a sequence, whose logits nobody needs: a prompt's tokens but the last. `progress` gets (tokens
    /// queued, tokens in all). Ends the decode loop. After an error the sequence can only be removed.
    ///
    /// Errors: as [`Self::feed`]; [`crate::Error::Cancelled`].
    pub fn prefill(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize, usize),
        cancel: &Cancel,
    ) -> Result<()> {
        for (done, &token) in tokens.iter().enumerate() {
            if done % CHECK_TOKENS == 0 {
                cancel.check()?;
                progress(done, tokens.len());
            }
            self.feed(&[(id, token)])?;
        }
        progress(tokens.len(), tokens.len());
        Ok(())
    }

    /// The same with the logits after each token: `sink` gets them in order, whole rows of `[V]`, one or several at a time.
    ///
    /// Errors: as [`Self::prefill`], and those of `sink`.
    pub fn prompt_logits(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        sink: &mut dyn FnMut(&[f32]) -> Result<()>,
        cancel: &Cancel,
    ) -> Result<()> {
        for &token in tokens {
            cancel.check()?;
            sink(&self.forward(&[(id, token)])?)?;
        }
        Ok(())
    }
}
