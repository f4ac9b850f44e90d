//! Tensors on a device: weights as stored, the model read top to bottom, and a stage of it as one object.
//!
//! `stage` is what the rest of the program sees. Next: `stage.rs`.

pub mod stage;
