//! Fuzzes `.mesh` files: no call on a file that opens may panic.
//!
//! An input is used twice: as a file, and as patches to the header of a valid small model, which then gets its hash.
#![no_main]
use bytes::Bytes;
use kernels_models::quantize::{Bits, QuantizeOptions, QuantizeProgress, prepare};
use kernels_models::stage::Activations;
use kernels_models::weights::testing::{TinyModel, seal_mesh};
use kernels_models::weights::{ModelFile, ShardIndex};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

fuzz_target!(|data: &[u8]| {
    open(data.to_vec());
    open(patched(data));
});

fn open(bytes: Vec<u8>) {
    let Ok(file) = ModelFile::from_bytes(Bytes::from(bytes)) else { return };
    let _ = (file.costs(Activations::Int8), file.stage_ranges(0..1), file.rotary_frequencies(&file.config().rope));
    for info in file.tensors() {
        let tensor = file.tensor(&info.name).expect("listed");
        let _ = tensor.rows_f32(tensor.rows - 1..tensor.rows);
    }
    let recorded = ShardIndex::recorded(&file).expect("in memory");
    assert!(recorded.is_none_or(|index| index.matches(&file)));
    let _ = (ShardIndex::build(&file, |_| ()), file.tokenizer().map(|_| ()), file.chat_template().map(|_| ()));
}

/// A valid small model, its header patched by the input's (position, value) pairs.
fn patched(data: &[u8]) -> Vec<u8> {
    static MODEL: OnceLock<(Vec<u8>, usize)> = OnceLock::new();
    let (model, header) = MODEL.get_or_init(|| {
        let tiny = TinyModel { layers: 1, width: 64, heads: 1, kv_heads: 1, ffn: 64, ..TinyModel::default() };
        let path = std::env::temp_dir().join(format!("fuzz-{}.mesh", std::process::id()));
        let options = QuantizeOptions { bits: Bits::Keep, force: true, threads: 1 };
        prepare(&tiny.open(), &path, &options, &Silent).and_then(|file| file.write(&Silent)).expect("written");
        let bytes = std::fs::read(&path).expect("written");
        std::fs::remove_file(&path).expect("removed");
        let header = ModelFile::from_bytes(bytes.clone().into()).expect("valid").header_range().end as usize;
        (bytes, header)
    });
    let mut bytes = model.clone();
    for patch in data.chunks_exact(3) {
        bytes[usize::from(u16::from_le_bytes([patch[0], patch[1]])) % header] = patch[2];
    }
    seal_mesh(&mut bytes);
    bytes
}

struct Silent;

impl QuantizeProgress for Silent {
    fn start(&self, _what: &str, _done: u64, _total: u64) {}
    fn at(&self, _done: u64) {}
}
