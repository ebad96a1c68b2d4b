//! Stop strings in streamed text.

/// What a piece of text let through.
pub struct Step {
    /// Text that can no longer be part of a stop string.
    pub text: String,
    /// Whether a stop string ended the text.
    pub matched: bool,
}

/// Finds the earliest stop string in text that comes in pieces.
pub struct StopMatcher {}

impl StopMatcher {
    /// For the strings of one request.
    pub fn new(stop: &[String], include: bool) -> Self {
        let _ = (stop, include);
        unimplemented!()
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Step {
        let _ = piece;
        unimplemented!()
    }

    /// What was still held back.
    pub fn finish(&mut self) -> String {
        unimplemented!()
    }
}
