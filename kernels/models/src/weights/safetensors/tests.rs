//! Tests of Hugging Face model folders against a GGUF file of the same model, and of malicious folders.
use std::path::Path;
use std::sync::Arc;

use kernels::quant::QuantType;
use serde_json::{Value as Json, json};

use crate::stage::Activations;
use crate::weights::testing::{TINY_CONTROL, TINY_MERGES, TinyModel};
use crate::weights::{Architecture, ModelFile, RopeKind, RopeScaling, ShardIndex, WeightsError};

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
        let phi3 = c.architecture == Architecture::Phi3;
        for tensor in source.tensors() {
            if phi3 && joined_to_another(&tensor.name) {
                continue;
            }
            let dtype = if tensor.quant == QuantType::F32 { "F32" } else { "F16" };
            let name = their_name(&tensor.name, c.architecture);
            // The folder has a matrix per expert.
            let count = if name.contains(".experts.") { c.experts.expect("a mixture").count } else { 1 };
            let mut bytes = source.read(&tensor.range).expect("in memory").to_vec();
            let mut rows = tensor.rows / count;
            if phi3 {
                // Key and value follow query, up follows gate.
                for (first, others) in [("attn_q.", &["attn_k.", "attn_v."][..]), ("ffn_gate.", &["ffn_up."])] {
                    for other in others.iter().filter(|_| tensor.name.contains(first)) {
                        let other = source.tensor(&tensor.name.replace(first, other)).expect("there");
                        bytes.extend(other.read(0..other.rows).expect("in memory"));
                        rows += other.rows;
                    }
                }
            }
            let vector = rows == 1 && !name.ends_with("expert_gate.weight");
            let shape = if vector { vec![tensor.cols] } else { vec![rows, tensor.cols] };
            for (expert, bytes) in bytes.chunks(bytes.len() / count).enumerate() {
                let start = data.len();
                data.extend(bytes);
                let name = name.replace(".experts.", &format!(".experts.{expert}."));
                header[name] = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
            }
        }
        let mixtral = c.architecture == Architecture::Llama && c.experts.is_some();
        let mistral3 = c.architecture == Architecture::Mistral3;
        let name = if mistral3 { "ministral3" } else { c.architecture.name() };
        let kind = if mixtral { "mixtral" } else { name }.replace("moe", "_moe");
        let mut config = json!({
            "model_type": kind, "hidden_act": "silu", "num_hidden_layers": c.layers,
            "max_position_embeddings": c.context, "hidden_size": c.width, "intermediate_size": c.ffn,
            "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
            "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": c.tied, "vocab_size": c.vocab,
        });
        if let Some(experts) = c.experts {
            let mixtral = c.architecture == Architecture::Llama;
            config[if mixtral { "num_local_experts" } else { "num_experts" }] = json!(experts.count);
            config["num_experts_per_tok"] = json!(experts.used);
            if !mixtral {
                config["moe_intermediate_size"] = json!(c.ffn);
                config["norm_topk_prob"] = json!(experts.normalised);
            }
            if let Some(shared) = experts.shared {
                config["shared_expert_intermediate_size"] = json!(shared.width);
            }
        }
        Self::family_options(source, &mut config);
        Self { config, header, data, tokenizer: tokenizer_json(source) }
    }

    /// As `configuration_phi3.py`, `configuration_glm4_moe.py` and `configuration_ministral3.py` of transformers name them.
    fn family_options(source: &ModelFile, config: &mut Json) {
        let c = source.config();
        if c.architecture == Architecture::Phi3 {
            let factors = |name: &str| source.tensor(name).expect("there").to_f32().expect("in memory");
            let (long, short) = (factors("rope_factors_long.weight"), factors("rope_factors_short.weight"));
            config["sliding_window"] = json!(9);
            config["partial_rotary_factor"] = json!(0.75);
            config["original_max_position_embeddings"] = json!(64);
            config["rope_scaling"] = json!({"type": "longrope", "long_factor": long, "short_factor": short});
            config["rope_scaling"]["attention_factor"] = json!(1.19f32);
        }
        if c.architecture == Architecture::Glm4Moe {
            config["num_experts"].take();
            config["n_routed_experts"] = json!(6);
            config["n_shared_experts"] = json!(2);
            config["shared_expert_intermediate_size"].take();
            config["moe_intermediate_size"] = json!(512);
            config["first_k_dense_replace"] = json!(1);
            config["routed_scaling_factor"] = json!(1.5);
            config["n_group"] = json!(1);
        }
        if c.architecture == Architecture::Mistral3 {
            config["rope_theta"].take();
            config["rope_parameters"] = json!({
                "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 8,
                "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3f32,
            });
        }
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

/// Whether a tensor of Phi-3 is a later part of a joined one, or is in `config.json`.
fn joined_to_another(name: &str) -> bool {
    name.starts_with("rope_factors") || ["attn_k", "attn_v", "ffn_up"].iter().any(|part| name.contains(part))
}

fn their_name(ours: &str, architecture: Architecture) -> String {
    let (phi3, glm) = (architecture == Architecture::Phi3, architecture == Architecture::Glm4Moe);
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
        "ffn_norm" | "post_attention_norm" => "post_attention_layernorm".to_owned(),
        "attn_q" if phi3 => "self_attn.qkv_proj".to_owned(),
        "ffn_gate" if phi3 => "mlp.gate_up_proj".to_owned(),
        "exp_probs_b" => return format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"),
        "attn_output" => "self_attn.o_proj".to_owned(),
        "attn_q_norm" => "self_attn.q_norm".to_owned(),
        "attn_k_norm" => "self_attn.k_norm".to_owned(),
        "ffn_gate_inp" => "mlp.gate".to_owned(),
        "ffn_gate_inp_shexp" => "mlp.shared_expert_gate".to_owned(),
        _ if stem.ends_with("_exps") => {
            format!("mlp.experts.{}_proj", stem.trim_start_matches("ffn_").trim_end_matches("_exps"))
        }
        _ if stem.ends_with("_shexp") => {
            let name = if glm { "shared_experts" } else { "shared_expert" };
            format!("mlp.{name}.{}_proj", stem.trim_start_matches("ffn_").trim_end_matches("_shexp"))
        }
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
    for architecture in [
        Architecture::Qwen2,
        Architecture::Qwen2Moe,
        Architecture::Qwen3,
        Architecture::Qwen3Moe,
        Architecture::Llama,
        Architecture::Phi3,
        Architecture::Glm4Moe,
        Architecture::Mistral3,
    ] {
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
        assert!(index.matches(&given));
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

/// The expressions of Phi-4-mini and Ministral 3, as their files have them.
#[test]
fn pre_tokenizers_are_recognised_by_their_expressions() {
    let upper = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+";
    let mixed = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*";
    let rest = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let endings = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
    let named = |regex: String| {
        let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"});
        let json = json!({"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": false}]});
        super::pre_tokenizer(&json).to_owned()
    };
    let digits = r"\p{N}{1,3}";
    assert_eq!(named(format!("{upper}{endings}|{mixed}{endings}|{digits}|{rest}")), "gpt-4o");
    assert_eq!(named(format!(r"{upper}|{mixed}|\p{{N}}|{rest}")), "tekken");
    assert_eq!(named(format!("{upper}|{mixed}|{digits}|{rest}")), "unknown (tokenizer.json)");
}

/// Layers that predict later tokens are no part of the model, and other families have none.
#[test]
fn predictors_in_a_folder_are_not_used() {
    for architecture in [Architecture::Glm4Moe, Architecture::Llama] {
        let source = tiny(architecture);
        let mut folder = Folder::of(&source);
        let start = folder.data.len();
        folder.data.extend([0; 1024]);
        let entry = json!({"dtype": "F32", "shape": [256], "data_offsets": [start, start + 1024]});
        folder.header["model.layers.2.enorm.weight"] = entry;
        match folder.open() {
            Ok(file) => {
                assert_eq!((architecture, file.tensors().len()), (Architecture::Glm4Moe, source.tensors().len()))
            }
            Err(error) => {
                assert!(architecture == Architecture::Llama && error.to_string().contains("enorm"), "{error}")
            }
        }
    }
}

/// The folder's weights in several files with an index.
fn write_parts(folder: &Folder, dir: &Path, count: usize) {
    folder.write_with(dir, &folder.weights());
    std::fs::remove_file(dir.join("model.safetensors")).expect("removed");
    let tensors: Vec<(&String, &Json)> =
        folder.header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__").collect();
    let mut map = serde_json::Map::new();
    for (number, tensors) in tensors.chunks(tensors.len().div_ceil(count)).enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", number + 1);
        let mut part = Folder { config: json!({}), header: json!({}), data: Vec::new(), tokenizer: json!({}) };
        for (tensor, entry) in tensors {
            let offset = |at: usize| entry["data_offsets"][at].as_u64().expect("an offset") as usize;
            let start = part.data.len();
            part.data.extend(&folder.data[offset(0)..offset(1)]);
            let offsets = [start, part.data.len()];
            part.header[tensor.as_str()] =
                json!({"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": offsets});
            map.insert((*tensor).clone(), json!(name));
        }
        std::fs::write(dir.join(&name), part.weights()).expect("written");
    }
    write_index(dir, &map);
}

fn write_index(dir: &Path, map: &serde_json::Map<String, Json>) {
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("written");
}

/// Mixtral's names differ from Qwen's.
#[test]
fn experts_of_mixtral_are_stacked() {
    let source = TinyModel { quant: QuantType::F16, experts: Some([4, 2]), layers: 2, ..TinyModel::default() }.open();
    let mut folder = Folder::of(&source);
    let names = [("mlp.gate.", "block_sparse_moe.gate."), ("mlp.experts.", "block_sparse_moe.experts.")];
    let parts = [("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")];
    let header = folder.header.as_object().expect("an object");
    let renamed = |name: &String| names.iter().chain(&parts).fold(name.clone(), |name, (a, b)| name.replace(a, b));
    folder.header = header.iter().map(|(name, entry)| (renamed(name), entry.clone())).collect();
    let file = folder.open().expect("opens");
    assert_eq!(file.config().experts, source.config().experts);
    for part in ["gate", "up", "down"] {
        let name = format!("blk.1.ffn_{part}_exps.weight");
        let read = |file: &ModelFile| file.tensor(&name).expect("there").to_f32().expect("readable");
        assert_eq!(read(&file), read(&source), "{name}");
    }
    // An expert is missing, or has another shape.
    let expert = "model.layers.1.block_sparse_moe.experts.2.w1.weight";
    let without = |change: &dyn Fn(&mut Json)| {
        let mut folder = Folder { header: folder.header.clone(), data: folder.data.clone(), ..Folder::of(&source) };
        change(&mut folder.header);
        folder.open().expect_err("not the model").to_string()
    };
    let error = without(&|header| _ = header.as_object_mut().expect("an object").remove(expert));
    assert!(error.contains("expected one matrix of all 3 experts"), "{error}");
    let error = without(&|header| header[expert]["shape"] = json!([256, 512]));
    assert!(error.contains("the same format and shape of all 4 experts"), "{error}");
}

#[test]
fn a_folder_in_parts_equals_the_whole_one() {
    let folder = Folder::of(&tiny(Architecture::Qwen3Moe));
    let whole = folder.open().expect("opens");
    let ids = |file: &ModelFile| -> std::collections::BTreeMap<String, [u8; 32]> {
        let index = ShardIndex::build(file, |_| ()).expect("complete");
        file.tensors().iter().map(|tensor| tensor.name.clone()).zip(index.tensor_ids()).collect()
    };
    for count in [1, 2, 5] {
        let dir = tempfile::tempdir().expect("a directory");
        write_parts(&folder, dir.path(), count);
        let first = dir.path().join(format!("model-00001-of-{count:05}.safetensors"));
        for path in [dir.path(), &dir.path().join("model.safetensors.index.json"), &first] {
            let file = ModelFile::open(path).expect("opens");
            assert_eq!(file.config(), whole.config());
            assert_eq!(ids(&file), ids(&whole), "{count} parts");
            let content = |file: &ModelFile| ShardIndex::build(file, |_| ()).expect("complete").content_id();
            assert_eq!(content(&file), content(&whole), "one content, however it is split");
            assert_eq!(file.tokenizer().expect("a tokenizer").len(), whole.tokenizer().expect("a tokenizer").len());
        }
        let file = ModelFile::open(dir.path()).expect("opens");
        let index = ShardIndex::build(&file, |_| ()).expect("complete");
        let copy = peers_copy(&file, &index);
        assert!(index.matches(&copy));
    }
}

#[test]
fn an_index_that_disagrees_with_its_files_is_rejected() {
    let folder = Folder::of(&tiny(Architecture::Llama));
    let dir = tempfile::tempdir().expect("a directory");
    let error = || ModelFile::open(dir.path()).expect_err("not the model").to_string();
    let fresh = || {
        write_parts(&folder, dir.path(), 3);
        let text = std::fs::read_to_string(dir.path().join("model.safetensors.index.json")).expect("there");
        let json: Json = serde_json::from_str(&text).expect("JSON");
        json["weight_map"].as_object().expect("a map").clone()
    };
    let mut map = fresh();
    map.insert("model.layers.7.extra.weight".to_owned(), json!("model-00001-of-00003.safetensors"));
    write_index(dir.path(), &map);
    assert!(
        error().contains("expected tensor \"model.layers.7.extra.weight\" in model-00001-of-00003.safetensors"),
        "{}",
        error()
    );
    let mut map = fresh();
    map.remove("model.norm.weight");
    write_index(dir.path(), &map);
    assert!(error().contains("\"model.norm.weight\" is missing"), "{}", error());
    fresh();
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).expect("removed");
    assert!(error().contains("part 2 of 3 of the model is missing"), "{}", error());
    fresh();
    let part = dir.path().join("model-00002-of-00003.safetensors");
    let len = std::fs::metadata(&part).expect("there").len();
    std::fs::File::options().write(true).open(&part).expect("opens").set_len(len - 1).expect("cut");
    assert!(error().contains("truncated: tensor"), "{}", error());
    // The same tensor in two files.
    let mut map = fresh();
    std::fs::copy(&part, dir.path().join("z.safetensors")).expect("copied");
    let name =
        map.iter().find(|(_, file)| **file == json!("model-00002-of-00003.safetensors")).map(|(name, _)| name.clone());
    map.insert(name.expect("a tensor"), json!("z.safetensors"));
    write_index(dir.path(), &map);
    assert!(error().contains("is in two files"), "{}", error());
}

/// A peer's copy, assembled from the chunks alone.
fn peers_copy(file: &ModelFile, index: &ShardIndex) -> Arc<ModelFile> {
    let dir = tempfile::tempdir().expect("a directory");
    let mut bytes = Vec::new();
    for (number, chunk) in index.chunks().iter().enumerate() {
        let given = file.read(&chunk.range).expect("readable");
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
    for (i, found) in file.rotary_frequencies(&file.config().rope, 64).expect("valid").inverse.iter().enumerate() {
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
    for (method, next) in
        [("fp8", "convert_hf_to_gguf.py"), ("gptq", "convert_hf_to_gguf.py"), ("awq", "as a GGUF file")]
    {
        rejects(&|f| f.config["quantization_config"] = json!({"quant_method": method}), next);
    }
    rejects(&|f| f.config["model_type"] = json!("llama4_text"), "stores experts transposed");
    rejects(&|f| f.config["model_type"] = json!("gemma3_text"), "norm weights minus one");
    rejects(&|f| f.header[norm]["dtype"] = json!("F8_E4M3"), "stored as F8_E4M3");
    rejects(&|f| f.header[norm]["shape"] = json!([1, 2, 128]), "one or two dimensions");
    rejects(&|f| f.header[norm]["shape"] = json!([0]), "at least 1");
    rejects(&|f| f.header[norm]["shape"] = json!([u64::MAX]), "rows are too long");
    rejects(&|f| f.header[norm]["shape"] = json!([u64::MAX, 256]), "exceeds 64 bits");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([0, 8]), "expected 1024 bytes");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([9, 8]), "expected 1024 bytes");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([0, 1024]), "overlap");
    rejects(&|f| f.header[norm]["data_offsets"] = json!([u64::MAX - 1024, u64::MAX]), "truncated");
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
