//! Tests of Hugging Face model folders against a GGUF file of the same model, and of malicious folders.
use std::path::Path;
use std::sync::Arc;

use kernels::quant::QuantType;
use serde_json::{Value as Json, json};

use crate::stage::Activations;
use crate::weights::testing::{TINY_CONTROL, TINY_MERGES, TinyModel};
use crate::weights::{Architecture, ModelFile, RopeKind, RopeScaling, ServedBytes, ShardIndex, WeightsError};

/// A model folder in Hugging Face's layout, with the weights of a [`ModelFile`].
struct Folder {
    config: Json,
    header: Json,
    data: Vec<u8>,
    tokenizer: Json,
}

impl Folder {
    fn of(source: &ModelFile) -> Self {
        let c = source.config();
        let (mut header, mut data) = (json!({"__metadata__": {"format": "pt"}}), Vec::new());
        for tensor in source.tensors() {
            let dtype = if tensor.quant == QuantType::F32 { "F32" } else { "F16" };
            let shape = if tensor.rows == 1 { vec![tensor.cols] } else { vec![tensor.rows, tensor.cols] };
            let start = data.len();
            data.extend(source.read(&tensor.range).expect("in memory"));
            header[their_name(&tensor.name)] =
                json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        }
        let config = json!({
            "model_type": c.architecture.name(), "hidden_act": "silu", "num_hidden_layers": c.layers,
            "max_position_embeddings": c.context, "hidden_size": c.width, "intermediate_size": c.ffn,
            "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
            "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": c.tied, "vocab_size": c.vocab,
        });
        Self { config, header, data, tokenizer: tokenizer_json(source) }
    }

    fn weights(&self) -> Vec<u8> {
        let mut header = self.header.to_string();
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &self.data].concat()
    }

    fn open_with(&self, weights: &[u8]) -> Result<Arc<ModelFile>, WeightsError> {
        let dir = tempfile::tempdir().expect("a directory");
        self.write_with(dir.path(), weights);
        ModelFile::open(dir.path())
    }

    fn write_with(&self, dir: &std::path::Path, weights: &[u8]) {
        let write = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).expect("written");
        write("model.safetensors", weights);
        write("config.json", self.config.to_string().as_bytes());
        write("tokenizer.json", self.tokenizer.to_string().as_bytes());
        let options = json!({"bos_token": {"content": TINY_CONTROL[1]}, "eos_token": TINY_CONTROL[2]});
        write("tokenizer_config.json", options.to_string().as_bytes());
    }

    fn open(&self) -> Result<Arc<ModelFile>, WeightsError> {
        self.open_with(&self.weights())
    }
}

fn their_name(ours: &str) -> String {
    let fixed = match ours {
        "token_embd.weight" => "model.embed_tokens.weight",
        "output_norm.weight" => "model.norm.weight",
        "output.weight" => "lm_head.weight",
        _ => "",
    };
    if !fixed.is_empty() {
        return fixed.to_owned();
    }
    let (layer, part) = ours.strip_prefix("blk.").and_then(|r| r.split_once('.')).expect("blk.N.part");
    let (stem, end) = part.rsplit_once('.').expect("an ending");
    let theirs = match stem {
        "attn_norm" => "input_layernorm".to_owned(),
        "ffn_norm" => "post_attention_layernorm".to_owned(),
        "attn_output" => "self_attn.o_proj".to_owned(),
        "attn_q_norm" => "self_attn.q_norm".to_owned(),
        "attn_k_norm" => "self_attn.k_norm".to_owned(),
        _ => match stem.split_once('_').expect("two words") {
            ("attn", which) => format!("self_attn.{which}_proj"),
            (_, which) => format!("mlp.{which}_proj"),
        },
    };
    format!("model.layers.{layer}.{theirs}.{end}")
}

fn tokenizer_json(source: &ModelFile) -> Json {
    let texts = source.metadata().texts("tokenizer.ggml.tokens").expect("strings").expect("there");
    let texts: Vec<String> = texts.map(|t| String::from_utf8_lossy(t).into_owned()).collect();
    let vocab: serde_json::Map<String, Json> =
        texts.iter().enumerate().skip(TINY_CONTROL.len()).map(|(i, t)| (t.clone(), json!(i))).collect();
    let merges: Vec<Json> = TINY_MERGES.iter().map(|m| json!(m.split(' ').collect::<Vec<_>>())).collect();
    let added: Vec<Json> =
        TINY_CONTROL.iter().enumerate().map(|(i, t)| json!({"id": i, "content": t, "special": true})).collect();
    json!({
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": false},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "added_tokens": added,
    })
}

fn tiny(architecture: Architecture) -> Arc<ModelFile> {
    TinyModel { architecture, quant: QuantType::F16, layers: 2, tied: false, ..TinyModel::default() }.open()
}

#[test]
fn a_folder_gives_the_same_model_as_its_gguf() {
    for architecture in [Architecture::Qwen2, Architecture::Qwen3, Architecture::Llama] {
        let source = tiny(architecture);
        let file = Folder::of(&source).open().expect("opens");
        let (mut ours, theirs) = (source.config().clone(), file.config());
        // Hugging Face uses the halves layout for Llama; GGUF interleaves it.
        ours.rope.kind = RopeKind::Halves;
        ours.name.clone_from(&theirs.name);
        assert_eq!(theirs, &ours);
        assert_eq!(file.tensors().len(), source.tensors().len());
        for tensor in source.tensors() {
            let (a, b) = (file.tensor(&tensor.name).expect("there"), source.tensor(&tensor.name).expect("there"));
            assert_eq!((a.quant, a.rows, a.cols), (b.quant, b.rows, b.cols), "{}", tensor.name);
            assert_eq!(a.read(0..a.rows).expect("readable"), b.read(0..b.rows).expect("readable"), "{}", tensor.name);
        }
        let (a, b) = (file.tokenizer().expect("a tokenizer"), source.tokenizer().expect("a tokenizer"));
        let text = "<|im_start|>hello world, hell<|im_end|>";
        assert_eq!(a.encode(text, true).expect("encodes"), b.encode(text, true).expect("encodes"));
        assert_eq!((a.bos(), a.eos()), (b.bos(), b.eos()));
        let index = ShardIndex::build(&file, |_| ()).expect("complete");
        assert!(index.matches(&file));
        let given = peers_copy(&file, &index);
        assert!(index.matches(&given) && given.served_header().is_none());
        assert_eq!(given.config(), file.config());
        for tensor in file.tensors() {
            let (a, b) = (given.tensor(&tensor.name).expect("there"), file.tensor(&tensor.name).expect("there"));
            assert_eq!((a.quant, a.rows, a.cols), (b.quant, b.rows, b.cols), "{}", tensor.name);
            assert_eq!(a.read(0..a.rows).expect("readable"), b.read(0..b.rows).expect("readable"), "{}", tensor.name);
        }
        let layers = |file: &ModelFile| file.costs(Activations::F32).layers;
        assert_eq!(layers(&file), layers(&source));
    }
}

/// A peer's copy, assembled from the chunks alone.
fn peers_copy(file: &ModelFile, index: &ShardIndex) -> Arc<ModelFile> {
    let dir = tempfile::tempdir().expect("a directory");
    let mut bytes = Vec::new();
    for (number, chunk) in index.chunks().iter().enumerate() {
        let given = match file.locate_served(&chunk.range) {
            ServedBytes::Header(bytes) => bytes.to_vec(),
            ServedBytes::File(range) => file.read(&range).expect("readable").to_vec(),
        };
        assert!(index.verify(number, &given), "{:?}", chunk.range);
        bytes.extend(given);
    }
    let path = dir.path().join("weights");
    std::fs::write(&path, &bytes).expect("written");
    ModelFile::open_partial(&path).expect("a model")
}

#[test]
fn a_folder_without_a_tokenizer_gives_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let folder = Folder::of(&tiny(Architecture::Llama));
    folder.write_with(dir.path(), &folder.weights());
    assert!(ModelFile::open(dir.path()).expect("opens").tokenizer().is_ok());
    std::fs::remove_file(dir.path().join("tokenizer.json")).expect("removed");
    let error =
        ModelFile::open(dir.path()).expect("a member needs only the weights").tokenizer().expect_err("no words");
    assert!(error.to_string().starts_with(&format!("{} has no tokenizer.json: ", dir.path().display())), "{error}");
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("removed");
    let error = ModelFile::open(dir.path()).expect_err("no weights").to_string();
    assert!(error.contains("is a folder without model.safetensors"), "{error}");
}

#[test]
fn biases_of_attention_are_found() {
    for architecture in [Architecture::Llama, Architecture::Qwen3] {
        let tiny = TinyModel { architecture, quant: QuantType::F16, biases: true, ..TinyModel::default() };
        let source = tiny.open();
        let file = Folder::of(&source).open().expect("opens");
        assert!(file.config().attention_bias && file.config().attention_output_bias);
        let output =
            |file: &ModelFile| file.tensor("blk.2.attn_output.bias").expect("there").to_f32().expect("readable");
        assert_eq!(output(&file), output(&source));
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let source = tiny(Architecture::Qwen2);
    let mut folder = Folder::of(&source);
    folder.config["tie_word_embeddings"] = json!(true);
    let file = folder.open().expect("opens");
    assert!(file.config().tied && file.tensor("output.weight").is_none());
}

/// Llama 3's scaling in its authors' formulation, in terms of wavelengths.
#[test]
fn llama_3_scaling() {
    let mut folder = Folder::of(&tiny(Architecture::Llama));
    folder.config["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let file = folder.open().expect("opens");
    assert!(matches!(file.config().rope.scaling, RopeScaling::Llama3 { .. }));
    for (i, found) in file.rotary_frequencies(&file.config().rope).expect("valid").inverse.iter().enumerate() {
        let plain = 10_000f64.powf(-(i as f64) / 32.0);
        let wavelength = std::f64::consts::TAU / plain;
        let expected = if wavelength < 8192.0 / 4.0 {
            plain
        } else if wavelength > 8192.0 {
            plain / 8.0
        } else {
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            (1.0 - smooth) * plain / 8.0 + smooth * plain
        };
        assert!((found - expected).abs() <= 1e-12 * expected, "pair {i}: {found} for {expected}");
    }
}

#[test]
fn unsupported_and_malformed_folders_are_rejected_by_name() {
    let source = tiny(Architecture::Qwen2);
    let rejects = |change: &dyn Fn(&mut Folder), part: &str| {
        let mut folder = Folder::of(&source);
        change(&mut folder);
        let error = folder.open().expect_err(part).to_string();
        assert!(error.contains(part), "expected {part:?} in {error:?}");
    };
    let norm = "model.norm.weight";
    rejects(&|f| f.config["model_type"] = json!("gpt_neox"), "\"gpt_neox\"; supported");
    rejects(&|f| f.config["hidden_act"] = json!("gelu"), "\"gelu\"; supported: silu");
    rejects(&|f| f.config["num_hidden_layers"] = json!(3), "\"blk.2.attn_norm.weight\" is missing");
    rejects(&|f| f.config["rope_scaling"] = json!({"rope_type": "longrope"}), "longrope");
    rejects(&|f| f.header[norm]["dtype"] = json!("F8_E4M3"), "stored as F8_E4M3");
    rejects(&|f| f.header[norm]["shape"] = json!([1, 2, 128]), "one or two dimensions");
    rejects(&|f| f.header[norm]["shape"] = json!([0]), "at least 1");
    rejects(&|f| f.header[norm]["shape"] = json!([u64::MAX]), "rows are too long");
    rejects(&|f| f.header[norm]["shape"] = json!([u64::MAX, 256]), "exceeds 64 bits");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([0, 8]), "expected 1024 bytes");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([9, 8]), "expected 1024 bytes");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([0, 1024]), "overlap");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([u64::MAX - 1024, u64::MAX]), "overflow");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([1u64 << 40, (1u64 << 40) + 1024]), "truncated");
    rejects(&|f| f.header["odd.weight"] = f.header[norm].clone(), "overlap");
    rejects(&|f| f.header[norm] = json!(7), "model.norm.weight");
    rejects(&|f| _ = f.data.pop(), "truncated");
    rejects(&|f| f.tokenizer["model"]["type"] = json!("Unigram"), "expected a BPE model");
    rejects(&|f| f.tokenizer["model"]["vocab"]["extra"] = json!(1 << 30), "no id below vocab_size");
    rejects(&|f| f.tokenizer["model"]["merges"] = json!([["a"]]), "to be a pair");
    let bare = tempfile::tempdir().expect("a directory");
    std::fs::write(bare.path().join("model.safetensors"), Folder::of(&source).weights()).expect("written");
    let error = ModelFile::open(bare.path()).expect_err("no config").to_string();
    assert!(error.contains("lacks config.json"), "{error}");
    assert!(ModelFile::open(Path::new("/")).expect_err("a directory").to_string().contains("model.safetensors"));
}

/// The header is truncated at every eighth length and a bit is flipped in every byte: rejected or valid, never a panic.
#[test]
fn a_corrupted_header_never_panics() {
    let source = TinyModel {
        architecture: Architecture::Qwen2,
        quant: QuantType::F16,
        layers: 1,
        width: 64,
        heads: 1,
        kv_heads: 1,
        ffn: 64,
        ..TinyModel::default()
    };
    let folder = Folder::of(&source.open());
    let whole = folder.weights();
    assert!(folder.open_with(&whole).is_ok());
    let header = whole.len() - folder.data.len();
    for len in (0..header).step_by(8).chain([header, whole.len() - 1]) {
        assert!(folder.open_with(&whole[..len]).is_err(), "cut at {len}");
    }
    let mut rejections = 0;
    for at in 0..header {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 7);
        match folder.open_with(&bytes) {
            Err(_) => rejections += 1,
            Ok(file) => assert!(file.tensors().iter().all(|t| t.range.end <= file.file_len())),
        }
    }
    assert!(rejections * 2 > header, "{rejections} of {header}");
}
