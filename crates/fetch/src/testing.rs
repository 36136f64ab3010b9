//! Test server on the loopback interface.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};

pub(crate) struct Request {
    pub(crate) path: String,
    /// Headers in lower case.
    pub(crate) headers: String,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Headers that replace the content length.
    pub(crate) headers: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn new(status: u16, body: &[u8]) -> Self {
        Self { status, headers: format!("Content-Length: {}", body.len()), body: body.to_owned() }
    }
}

/// Starts a server that ends with the test process.
pub(crate) fn server(answer: impl Fn(&Request) -> Answer + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut first = String::new();
            let mut headers = String::new();
            // A client that disconnects early is not a failure here.
            let _ = reader.read_line(&mut first);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
                    break;
                }
                headers.push_str(&line.to_lowercase());
            }
            let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
            let Answer { status, headers, body } = answer(&Request { path, headers });
            let head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n{headers}\r\n\r\n");
            let mut stream = reader.into_inner();
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        }
    });
    address
}
