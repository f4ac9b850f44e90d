//! meshnode.
fn main() {}
