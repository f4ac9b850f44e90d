//! Communication between members.
use super::*;
use std::collections::BTreeSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_exchange_messages_frames_and_requests() {
    let mut nodes = mesh(3);
    for (from, to) in [(0, 1), (0, 2), (2, 1)] {
        nodes[from].dial(&nodes[to]);
        let (from_id, to_id) = (nodes[from].id(), nodes[to].id());
        nodes[from].connected(&to_id).await;
        nodes[to].connected(&from_id).await;
    }
    for from in 0..3 {
        let to = (from + 1) % 3;
        let target = nodes[to].id();
        nodes[to].endpoint.expect(route(7), Expectation::hidden(Dtype::F32, 64, 512));
        for i in 0..100u32 {
            nodes[from].endpoint.send_message(target, i.to_le_bytes().to_vec().into()).unwrap();
        }
        for i in 0..100u32 {
            assert_eq!(nodes[to].message().await, i.to_le_bytes());
        }
        let (one, many) = (head(route(7), 3, 1, 64), head(route(7), 4, 512, 64));
        nodes[from].endpoint.send_frame(target, one, rows(1, 64), Priority::Decode).unwrap();
        nodes[from].endpoint.send_frame(target, many, rows(512, 64), Priority::Prefill).unwrap();
        let mut frames = [nodes[to].frame().await, nodes[to].frame().await];
        frames.sort_by_key(|(_, head, _)| head.cursor);
        let sender = nodes[from].id();
        assert_eq!(frames[0], (sender, one, rows(1, 64).to_vec()));
        assert_eq!(frames[1], (sender, many, rows(512, 64).to_vec()));

        let asked = nodes[from].endpoint.request(target, Bytes::from_static(b"again ")).await.unwrap();
        assert_eq!(asked.all(6000).await.unwrap(), b"again ".repeat(1000));
        for (request, answer) in [
            (&b"refuse"[..], RequestError::Rejected("not today".into())),
            (b"die", RequestError::Truncated),
            (b"too much", RequestError::Answer { bytes_max: 6000 }),
        ] {
            let asked = nodes[from].endpoint.request(target, Bytes::from_static(request)).await.unwrap();
            assert_eq!(asked.all(6000).await, Err(answer));
        }
    }
    let stats = nodes[0].endpoint.peers();
    assert_eq!(stats.len(), 2);
    assert!(stats.iter().all(|s| s.bytes_sent > 0 && s.bytes_received > 0 && s.dialed_here));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_to_a_known_peer_connects_first() {
    let mut nodes = mesh(2);
    let (a, b) = pair(&mut nodes);
    let message = Bytes::from_static(b"first");
    assert_eq!(a.endpoint.send_message(b.id(), message.clone()), Err(SendError::Unknown));
    a.endpoint.learn(b.identity.peer_id(), vec![b.addr()]);
    b.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 8, 1));
    a.endpoint.send_message(b.id(), message).unwrap();
    a.endpoint.send_frame(b.id(), head(route(1), 0, 1, 8), rows(1, 8), Priority::Decode).unwrap();
    a.endpoint.send_message(b.id(), Bytes::from_static(b"second")).unwrap();
    assert_eq!(b.message().await, b"first");
    assert_eq!(b.message().await, b"second");
    assert_eq!(b.frame().await.2, rows(1, 8).to_vec());
    a.connected(&b.id()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dials_that_cross_leave_one_connection() {
    for _ in 0..10 {
        let mut nodes = mesh(2);
        let (a, b) = pair(&mut nodes);
        a.dial(b);
        b.dial(a);
        a.endpoint.send_message(b.id(), Bytes::from_static(b"from a")).unwrap();
        b.endpoint.send_message(a.id(), Bytes::from_static(b"from b")).unwrap();
        assert_eq!(b.message().await, b"from a");
        assert_eq!(a.message().await, b"from b");
        for (x, y) in [(&a, &b), (&b, &a)] {
            x.endpoint.send_message(y.id(), Bytes::from_static(b"again")).unwrap();
        }
        assert_eq!(a.message().await, b"again");
        assert_eq!(b.message().await, b"again");
        for node in [&mut *a, &mut *b] {
            assert_eq!(node.endpoint.peers().len(), 1);
            let seen = node.drain_events();
            let ends = seen.iter().filter(|e| matches!(e, Event::Disconnected { .. })).count();
            let starts = seen.iter().filter(|e| matches!(e, Event::Connected { .. })).count();
            assert_eq!((starts, ends), (1, 0), "{seen:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_peer_replaces_its_old_connection() {
    let mut nodes = connected_pair(Limits::default()).await;
    let b = nodes.pop().unwrap();
    let mut a = nodes.pop().unwrap();
    let (identity, credentials) = (b.identity.clone(), b.endpoint.0.credentials().map(|c| (*c).clone()));
    // As after a crash: the old endpoint still exists, unreachable, on another port.
    let mut reborn = Node::start(identity, credentials, Limits::default());
    reborn.dial(&a);
    reborn.connected(&a.id()).await;
    let reason = a.disconnected().await;
    assert!(matches!(reason, Disconnect::Here { code: CloseCode::Duplicate, .. }), "{reason:?}");
    a.connected(&reborn.id()).await;
    a.endpoint.send_message(reborn.id(), Bytes::from_static(b"welcome back")).unwrap();
    assert_eq!(reborn.message().await, b"welcome back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_close_loses_nothing() {
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    for i in 0..500u32 {
        a.endpoint.send_message(b.id(), vec![i as u8; 1000].into()).unwrap();
    }
    a.endpoint.shutdown().await;
    for i in 0..500u32 {
        assert_eq!(b.message().await, vec![i as u8; 1000]);
    }
    let reason = b.disconnected().await;
    let bye = matches!(
        reason,
        Disconnect::Here { code: CloseCode::Bye, .. } | Disconnect::ByPeer { code: CloseCode::Bye, .. }
    );
    assert!(bye, "{reason:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_peer_receives_the_close_code() {
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    a.endpoint.disconnect(b.id());
    assert!(matches!(a.disconnected().await, Disconnect::Here { code: CloseCode::Removed, .. }));
    assert!(matches!(b.disconnected().await, Disconnect::ByPeer { code: CloseCode::Removed, .. }));
    assert!(a.endpoint.peers().is_empty());
    assert_eq!(a.endpoint.send_message(b.id(), Bytes::new()), Err(SendError::Unknown));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_ends_with_its_certificate() {
    let mut nodes = mesh(1);
    let mut node = nodes.pop().unwrap();
    let mesh = (*node.endpoint.0.credentials().unwrap()).clone();
    let identity = Identity::generate();
    let soon = member(&mesh, &node.identity, &identity, now_unix() + 5);
    let mut guest = Node::start(identity, Some(soon), Limits::default());
    guest.dial(&node);
    node.connected(&guest.id()).await;
    assert!(matches!(node.disconnected().await, Disconnect::Here { code: CloseCode::CertificateExpired, .. }));
    assert!(matches!(guest.disconnected().await, Disconnect::ByPeer { code: CloseCode::CertificateExpired, .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_address_is_reported() {
    let mut nodes = mesh(1);
    let a = &mut nodes[0];
    let stranger = Identity::generate().peer_id();
    a.endpoint.connect(stranger, Vec::new());
    assert_eq!(a.disconnected().await, Disconnect::Dial(DialError::NoAddress { peer: stranger.into() }));
    // A bound socket that does not answer.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let addr = silent.local_addr().unwrap();
    a.endpoint.connect(stranger, vec![addr]);
    let text = a.disconnected().await.to_string();
    assert!(text.contains(&addr.to_string()), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_correct_address_among_several_is_found() {
    let mut nodes = mesh(3);
    let other = nodes[2].addr();
    let (a, b) = pair(&mut nodes);
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    a.endpoint.connect(b.identity.peer_id(), vec![silent.local_addr().unwrap(), other, b.addr()]);
    a.connected(&b.id()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_frames_are_packed_on_slow_links() {
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    b.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 576, 512));
    let peer = a.endpoint.0.peer(&b.id()).unwrap();
    let send = |a: &Node, position| {
        let before = peer.connection.stats().udp_tx.bytes;
        let large = head(route(1), position, 512, 576);
        a.endpoint.send_frame(b.identity.node_id(), large, rows(512, 576), Priority::Prefill).unwrap();
        before
    };
    peer.learn_link(1_000_000);
    let before = send(a, 0);
    assert_eq!(b.frame().await.2, rows(512, 576).to_vec());
    assert!(peer.connection.stats().udp_tx.bytes - before < 400_000, "1.2 MB of repeating values");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_is_measured() {
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    let link = a.endpoint.measure(b.id()).await.unwrap();
    assert!(link.bytes_per_second > 0);
    assert_eq!(a.endpoint.peers()[0].bytes_per_second, Some(link.bytes_per_second));
    let learned = || b.endpoint.peers()[0].bytes_per_second_in;
    while learned().is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(learned(), Some(link.bytes_per_second), "the other side records it, too");
    assert_eq!(a.endpoint.measure([0; 16]).await, Err(RequestError::NotConnected));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_does_not_read_is_reset() {
    let limits = Limits { frame_queue_bytes: 4 << 20, arrived_bytes: 4 << 20, ..Limits::default() };
    let mut nodes = connected_pair(limits).await;
    let (a, b) = pair(&mut nodes);
    b.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 2048, 512));
    // b holds every frame (its event queue is not read), so its credit is exhausted, then the windows fill, then a's
    // queue.
    let sent = (0..1000).find_map(|i| {
        let frame = head(route(1), i, 512, 2048);
        a.endpoint.send_frame(b.id(), frame, rows(512, 2048), Priority::Prefill).err()
    });
    assert_eq!(sent, Some(SendError::Slow));
    assert!(matches!(a.disconnected().await, Disconnect::Here { code: CloseCode::TooSlow, .. }));
    // The close may be lost in the data in flight; then b detects a timeout.
    let reason = b.disconnected().await;
    let closed = matches!(reason, Disconnect::ByPeer { code: CloseCode::TooSlow, .. } | Disconnect::Lost);
    assert!(closed, "{reason:?}");
    let held: usize = b.passed.iter().filter(|e| matches!(e, Event::Frame { .. })).count();
    assert!(held <= 1, "{held} frames of 4 MiB arrived, the credit is 4 MiB");
}

/// For a standby that does not read, copies are dropped and nothing is reset. Later it receives what it requests again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_for_a_standby_that_does_not_read_are_dropped() {
    let limits = Limits { standby_queue_bytes: 4 << 20, arrived_bytes: 4 << 20, ..Limits::default() };
    let mut nodes = connected_pair(limits).await;
    let (a, b) = pair(&mut nodes);
    b.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 2048, 512));
    let to = b.id();
    let send =
        |position, priority| a.endpoint.send_frame(to, head(route(1), position, 512, 2048), rows(512, 2048), priority);
    // b holds every frame: its credit is exhausted, then the windows fill, then a's queue of copies.
    let (first, error) =
        (0..1000).find_map(|i| Some((i, send(i, Priority::Standby).err()?))).expect("a copy is dropped");
    assert_eq!(error, SendError::CopyDropped);
    assert!(a.endpoint.peers()[0].queued_bytes < (4 << 20) + rows(512, 2048).len() + 1024, "the queue is bounded");
    assert_eq!(send(first, Priority::Prefill), Ok(()), "a frame on the critical path is not dropped");
    let mut arrived = BTreeSet::new();
    while arrived.len() <= first as usize {
        arrived.insert(b.frame().await.1.cursor);
    }
    assert!(arrived.into_iter().eq(0..=first), "all arrive over the same connection");
    while let Err(error) = send(first + 1, Priority::Standby) {
        assert_eq!(error, SendError::CopyDropped);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(b.frame().await.1.cursor, first + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_resume_when_the_receiver_releases_credit() {
    let limits = Limits { arrived_bytes: 1 << 20, ..Limits::default() };
    let mut nodes = connected_pair(limits).await;
    let (a, b) = pair(&mut nodes);
    b.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 2048, 64));
    for i in 0..20 {
        a.endpoint.send_frame(b.id(), head(route(1), i, 64, 2048), rows(64, 2048), Priority::Prefill).unwrap();
    }
    for i in 0..20 {
        assert_eq!(b.frame().await.1.cursor, i);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_reported_with_the_flag() {
    let nodes = mesh(1);
    let options = Options {
        listen: nodes[0].addr(),
        identity: Identity::generate(),
        credentials: None,
        limits: Limits::default(),
    };
    let error = Endpoint::bind(options, |_| {}, serve).unwrap_err().to_string();
    assert!(error.contains("--port") && error.contains(&nodes[0].addr().port().to_string()), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unexpected_frames_stop_their_stream_not_the_connection() {
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    b.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 8, 1));
    let other_epoch = Route { epoch: Epoch { counter: 2, issuer: [1; 16] }, ..route(1) };
    for unexpected in [route(2), other_epoch] {
        a.endpoint.send_frame(b.id(), head(unexpected, 0, 1, 8), rows(1, 8), Priority::Decode).unwrap();
        assert!(b.refused().await.contains("not expected"));
        // a sees the stop with its next frame.
        let stopped = async {
            loop {
                match a.endpoint.send_frame(b.id(), head(unexpected, 1, 1, 8), rows(1, 8), Priority::Decode) {
                    Ok(()) => tokio::task::yield_now().await,
                    Err(error) => return error,
                }
            }
        };
        assert_eq!(timeout(PATIENCE, stopped).await.unwrap(), SendError::Ended);
        let refused = a.until(|e| match e {
            Event::StreamStopped { route, .. } => Some(*route),
            _ => None,
        });
        assert_eq!(refused.await, unexpected);
    }
    // The newer epoch ended the older stream to that part; the job continues under a third epoch.
    let third = Route { epoch: Epoch { counter: 3, issuer: [1; 16] }, ..route(1) };
    b.endpoint.expect(third, Expectation::hidden(Dtype::F32, 8, 1));
    a.endpoint.send_frame(b.id(), head(third, 0, 1, 8), rows(1, 8), Priority::Decode).unwrap();
    assert_eq!(b.frame().await.1.route, third);
    b.endpoint.forget(1);
    assert!(!a.drain_events().iter().any(|e| matches!(e, Event::Disconnected { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_frames_and_messages_are_not_sent() {
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    let wrong = a.endpoint.send_frame(b.id(), head(route(1), 0, 2, 8), rows(1, 8), Priority::Decode);
    assert_eq!(wrong, Err(SendError::Shape { bytes: 32, expected: 64 }));
    let long = Bytes::from(vec![0; MESSAGE_BYTES_MAX + 1]);
    let bytes = long.len();
    assert_eq!(a.endpoint.send_message(b.id(), long), Err(SendError::TooLong { bytes, most: MESSAGE_BYTES_MAX }));
    let largest = Bytes::from(vec![3; MESSAGE_BYTES_MAX]);
    a.endpoint.send_message(b.id(), largest.clone()).unwrap();
    assert_eq!(b.message().await, largest);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_are_limited_to_their_share() {
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    // a serves b: 1000 x 1000 bytes at 70 % of 2 MB/s take 0.7 s, less the allowed debt.
    a.endpoint.0.peer(&b.id()).unwrap().throttle.set(Some(1_400_000));
    let start = std::time::Instant::now();
    let answer = b.endpoint.request(a.id(), vec![1; 1000].into()).await.unwrap().all(1 << 20).await.unwrap();
    assert_eq!(answer.len(), 1_000_000);
    assert!(start.elapsed() > Duration::from_millis(600), "not paced: {:?}", start.elapsed());
}

/// While eight responses of 32 MiB each are in flight, later frames overtake the data that is not on the wire yet. A
/// busy machine may deliver single frames late; but queued behind the weights, all of them would arrive last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_frame_does_not_wait_behind_weights() {
    const ANSWERS: usize = 8;
    const ANSWER_BYTES: usize = 1000 * (32 << 10);
    let mut nodes = connected_pair(Limits::default()).await;
    let (a, b) = pair(&mut nodes);
    b.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 8, 1));
    let arrived = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let fetched = || arrived.load(std::sync::atomic::Ordering::SeqCst);
    let mut answers = Vec::new();
    for _ in 0..ANSWERS {
        let mut response = b.endpoint.request(a.id(), vec![1; 32 << 10].into()).await.unwrap();
        let arrived = arrived.clone();
        answers.push(tokio::spawn(async move {
            while let Some(block) = response.block().await.unwrap() {
                arrived.fetch_add(block.len(), std::sync::atomic::Ordering::SeqCst);
            }
        }));
    }
    let mut passed = Vec::new();
    for position in 0..12 {
        let next = (2 + position as usize) * ANSWER_BYTES / 2;
        if fetched() > 6 * ANSWER_BYTES {
            break;
        }
        while fetched() < next {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let before = fetched();
        a.endpoint.send_frame(b.id(), head(route(1), position, 1, 8), rows(1, 8), Priority::Decode).unwrap();
        assert_eq!(b.frame().await.1.cursor, position);
        passed.push((fetched() - before, ANSWERS * ANSWER_BYTES - before));
    }
    assert!(passed.iter().any(|(bytes, left)| *bytes < left / 2), "bytes before each frame, of the rest: {passed:?}");
    for answer in answers {
        timeout(PATIENCE, answer).await.unwrap().unwrap();
    }
    assert_eq!(fetched(), ANSWERS * ANSWER_BYTES);
}
