//! First bytes of what nodes ask each other on bulk streams, in one place, so that no two questions are the same.

/// A content's shard index.
pub(crate) const INDEX: u8 = 1;
/// One chunk of a content.
pub(crate) const CHUNK: u8 = 2;
/// A membership that lasts longer.
pub(crate) const RENEWAL: u8 = 3;
/// Who is out, and the mesh's key.
pub(crate) const BANS: u8 = 4;
/// Which chunks of a content there are.
pub(crate) const HAVE: u8 = 5;
/// Which models a member serves.
pub(crate) const SERVED: u8 = 7;
