//! Hostile weights files and shard indexes: whatever opens can be asked everything without a panic.
#![no_main]
use bytes::Bytes;
use kernels::weights::{ModelFile, ShardIndex};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(index) = ShardIndex::decode(data) {
        assert_eq!(ShardIndex::decode(&index.encode()).map(|again| again.content_id()).ok(), Some(index.content_id()));
    }
    let Ok(file) = ModelFile::from_bytes(Bytes::copy_from_slice(data)) else { return };
    let _ = file.costs();
    let _ = file.stage_ranges(0..1);
    let _ = file.rotary_frequencies();
    let _ = file.tokenizer();
    let _ = file.chat_template();
    for info in file.tensors() {
        let _ = file.tensor(&info.name).map(|tensor| tensor.row_bytes());
    }
});
