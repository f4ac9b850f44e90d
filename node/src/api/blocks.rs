//! The parts of an answer as blocks that open, grow and close, for APIs whose streams announce each block.
use super::output::{Part, ToolCall};

/// A change of the blocks. `at`: the number of the block in the answer, from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BlockEvent {
    /// A block of text begins, still empty.
    Opened { at: usize, kind: TextKind },
    /// Text is added to the open block.
    Grown { at: usize, kind: TextKind, text: String },
    /// The open block is complete.
    Closed { at: usize, kind: TextKind, text: String },
    /// A tool call is a block of its own, complete from the beginning.
    Called { at: usize, call: ToolCall },
}

/// What the text of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextKind {
    Thoughts,
    Answer,
}

/// The blocks of an answer so far.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// Invariant: neighbours are not both text of the same kind.
    parts: Vec<Part>,
    /// The last part can grow.
    open: bool,
}

impl Blocks {
    /// The blocks so far.
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Adds a part.
    pub(super) fn push(&mut self, part: Part) -> Vec<BlockEvent> {
        let (kind, text) = match part {
            Part::Thoughts(text) => (TextKind::Thoughts, text),
            Part::Text(text) => (TextKind::Answer, text),
            Part::Call(call) => {
                let mut events: Vec<BlockEvent> = self.close().into_iter().collect();
                events.push(BlockEvent::Called { at: self.parts.len(), call: call.clone() });
                self.parts.push(Part::Call(call));
                return events;
            }
        };
        if text.is_empty() {
            return Vec::new();
        }
        let mut events = Vec::new();
        match (self.parts.last_mut(), kind) {
            (Some(Part::Thoughts(before)), TextKind::Thoughts) | (Some(Part::Text(before)), TextKind::Answer) => {
                before.push_str(&text);
            }
            (Some(_) | None, _) => {
                events.extend(self.close());
                events.push(BlockEvent::Opened { at: self.parts.len(), kind });
                self.parts.push(match kind {
                    TextKind::Thoughts => Part::Thoughts(text.clone()),
                    TextKind::Answer => Part::Text(text.clone()),
                });
                self.open = true;
            }
        }
        events.push(BlockEvent::Grown { at: self.parts.len() - 1, kind, text });
        events
    }

    /// Closes the open block, if there is one.
    pub(super) fn close(&mut self) -> Option<BlockEvent> {
        if !std::mem::take(&mut self.open) {
            return None;
        }
        let at = self.parts.len().checked_sub(1)?;
        match &self.parts[at] {
            Part::Thoughts(text) => Some(BlockEvent::Closed { at, kind: TextKind::Thoughts, text: text.clone() }),
            Part::Text(text) => Some(BlockEvent::Closed { at, kind: TextKind::Answer, text: text.clone() }),
            Part::Call(_) => None,
        }
    }
}
