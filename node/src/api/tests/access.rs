//! Tests of access control: web pages, other addresses, other users of the machine, the single-use link.
use super::*;

#[test]
fn a_web_page_cannot_post() {
    let server = start(FakeNode::generating("x"));
    let body = chat_body(json!({})).to_string();
    let page = "POST /v1/chat/completions\r\nOrigin: https://evil.example\r\n";
    let (status, _, text) = server.call(page, &body);
    assert_eq!(status, 403, "{text}");
    let rebound = "POST /api/v1/leave\r\nHost: evil.example:9470\r\n";
    assert_eq!(server.call(rebound, "{}").0, 403);
    assert_eq!(server.call("OPTIONS /v1/chat/completions\r\nOrigin: https://evil.example\r\n", "").0, 403);
    assert!(server.engine.requests.lock().is_empty());
}

#[test]
fn other_addresses_need_a_key() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(Api::bind("0.0.0.0:0".parse().unwrap(), Some(String::new()))).err().unwrap();
    assert!(error.to_string().contains("--api-key"), "{error}");
    let server = start_with_key(FakeNode::generating("x"), Some("k"));
    let none = "Authorization: \r\n";
    assert_eq!(server.call(&format!("GET /v1/models\r\n{none}"), "").0, 401);
    assert_eq!(server.call("GET /v1/models\r\nAuthorization: Bearer k\r\n", "").0, 200);
    // Pages contain no data until they have fetched it with the key.
    for page in ["/", "/watch/12"] {
        let (status, _, text) = server.call(&format!("GET {page}\r\n{none}"), "");
        assert!(status == 200 && text.contains("<!doctype html>"), "{page}: {status}");
    }
    assert_eq!(server.call(&format!("GET /api/v1/state\r\n{none}"), "").0, 401);
    assert_eq!(server.call("GET /api/v1/state", "").0, 200, "the node's own key grants full access");
    let taken = runtime.block_on(Api::bind(server.address, None)).err().unwrap();
    assert!(taken.to_string().contains("a node may be running already"), "{taken}");
}

/// Every route and its required access, repeated here so that the access of a new route is a deliberate choice.
const ROUTES: &[(&str, Access)] = &[
    ("GET /v1/models", Access::Open),
    ("GET /v1/models/{*name}", Access::Open),
    ("POST /v1/chat/completions", Access::Open),
    ("POST /v1/completions", Access::Open),
    ("POST /v1/responses", Access::Open),
    ("POST /v1/embeddings", Access::Open),
    ("POST /v1/messages", Access::Open),
    ("POST /v1/messages/count_tokens", Access::Open),
    ("GET /openapi.json", Access::Public),
    ("GET /healthz", Access::Public),
    ("GET /readyz", Access::Open),
    ("GET /metrics", Access::Open),
    ("GET /api/v1/proof", Access::Public),
    ("POST /api/v1/open", Access::Administer),
    ("POST /api/v1/session", Access::Public),
    ("GET /api/v1/state", Access::Open),
    ("GET /api/v1/peers", Access::Open),
    ("GET /api/v1/jobs", Access::Open),
    ("POST /api/v1/plan", Access::Open),
    ("POST /api/v1/deploy", Access::Administer),
    ("DELETE /api/v1/models/{*name}", Access::Administer),
    ("POST /api/v1/generate", Access::Open),
    ("POST /api/v1/grids", Access::Administer),
    ("GET /api/v1/grids", Access::Open),
    ("POST /api/v1/grids/plan", Access::Open),
    ("GET /api/v1/grids/{job}", Access::Open),
    ("DELETE /api/v1/grids/{job}", Access::Administer),
    ("GET /api/v1/grids/{job}/picture", Access::Open),
    ("GET /api/v1/grids/{job}/text", Access::Open),
    ("GET /api/v1/grids/{job}/events", Access::Open),
    ("GET /", Access::Public),
    ("GET /watch/{job}", Access::Public),
    ("POST /api/v1/invite", Access::Administer),
    ("POST /api/v1/approve", Access::Administer),
    ("POST /api/v1/ban", Access::Administer),
    ("POST /api/v1/drain", Access::Administer),
    ("POST /api/v1/leave", Access::Administer),
];

#[test]
fn another_user_of_the_machine_cannot_administer_the_node() {
    let known: Vec<(String, Access)> = routes::<FakeNode>()
        .into_iter()
        .map(|(method, path, access, _)| (format!("{method} {path}"), access))
        .collect();
    let listed: Vec<(String, Access)> = ROUTES.iter().map(|(route, access)| ((*route).to_owned(), *access)).collect();
    assert_eq!(known, listed);
    let server = start(FakeNode::generating("x"));
    for (route, access) in ROUTES {
        let line = route.replace("{*name}", "tiny").replace("{job}", "0123456789abcdef");
        for key in ["", "Bearer ", "Bearer sk-anything", "Basic cm9vdDpyb290"] {
            let (status, _, text) = server.call(&format!("{line}\r\nAuthorization: {key}\r\n"), "{}");
            match access {
                Access::Administer => assert_eq!(status, 401, "{line} with `{key}`: {text}"),
                Access::Open => assert_ne!(status, 401, "{line} with `{key}`: {text}"),
                // A body without a token is a bad request, not unauthorised.
                Access::Public => assert_ne!(status, 401, "{line} with `{key}`: {text}"),
            }
        }
        if *access == Access::Administer {
            let (status, _, text) = server.call(&line, "{}");
            assert_ne!(status, 401, "{line} with the key: {text}");
        }
    }
    assert_eq!(*server.engine.stopped.lock(), ["tiny"], "only the requests with the key had an effect");
    let plan = "POST /api/v1/plan\r\nAuthorization: \r\n";
    let (status, _, text) = server.call(plan, &json!({"model": "/home/me/secret.gguf"}).to_string());
    assert!(status == 401 && text.contains("is a path"), "{text}");
}

#[test]
fn a_link_opens_the_page_once() {
    let server = start(FakeNode::generating("x"));
    let (status, link) = server.post("/api/v1/open", json!({}));
    assert_eq!(status, 200, "{link}");
    let token = link["fragment"].as_str().and_then(|f| f.strip_prefix("token=")).unwrap();
    let body = json!({"token": token});
    let begin = || {
        let (status, _, text) = server.call("POST /api/v1/session\r\nAuthorization: \r\n", &body.to_string());
        (status, serde_json::from_str::<Value>(&text).unwrap())
    };
    let (status, page) = begin();
    assert_eq!(status, 200, "{page}");
    let key = format!("Authorization: Bearer {}\r\n", page["key"].as_str().unwrap());
    assert_eq!(server.call(&format!("POST /api/v1/drain\r\n{key}"), r#"{"on": true}"#).0, 200);
    let (status, again) = begin();
    assert_eq!(status, 401);
    assert!(again["error"]["message"].as_str().unwrap().contains("meshnode open"), "{again}");
    let token = format!("Authorization: Bearer {token}\r\n");
    assert_eq!(server.call(&format!("POST /api/v1/drain\r\n{token}"), r#"{"on": true}"#).0, 401, "it is no key");
}

#[test]
fn a_command_sends_its_key_only_to_a_node_that_proves_to_know_it() {
    use crate::client::{Client, ClientError, Key};
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, key: &str| {
        let path = dir.path().join(name);
        crate::private::write(&path, key.replace(' ', "-").as_bytes()).unwrap();
        path
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let api = runtime.block_on(Api::bind("127.0.0.1:0".parse().unwrap(), None)).unwrap();
    let address = api.address().unwrap().to_string();
    let api = api.administered_with(ApiKey::given("the-key-of-this-node"));
    runtime.spawn(api.serve(FakeNode::generating(""), Metrics::default(), std::future::pending()));
    let drain = |files: Vec<std::path::PathBuf>| {
        Client::new(Some(&address), Key::in_files(files)).post("/api/v1/drain", &json!({"on": true}))
    };
    let (other, own) = (file("other.key", "the key of another node"), file("api.key", "the key of this node"));
    drain(vec![other.clone(), dir.path().join("none"), own]).unwrap();
    let error = drain(vec![other, dir.path().join("none")]).unwrap_err();
    assert!(matches!(error, ClientError::Unauthorised { .. }), "{error:?}");
    for words in ["other.key holds the key of another node", "none is not there", "--api-key-file", "--api-key"] {
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
}
