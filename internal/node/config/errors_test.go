package config

import (
	"strings"
	"testing"
	"time"
)

// one loads a single document, as the file "f".
func one(text string) *Result {
	l := newLoader()
	l.rank["f"] = 0
	l.Files = []string{"f"}
	l.apply("f", text)
	return l.result()
}

const (
	goodTable = "[driver.good]\nsocket = \"/run/good.sock\"\n"

	wantPath     = ` (must be an absolute path such as "/run/csi-nfs/csi.sock")`
	wantSpan     = ` (must be a duration above zero such as "5s" or "1m30s")`
	wantVersions = ` (must be a list of versions such as ["1.0.0"])`
	wantOwner    = ` (must be a user's name, a uid such as "1000", or "any")`
	wantName     = ` (must be the name that the driver answers to GetPluginInfo)`
	refused      = "is not a driver name that the API server accepts: "
)

// TestValues has an error in one value each: the whole message, and the table is out.
func TestValues(t *testing.T) {
	for _, c := range []struct{ value, want string }{
		{`socket = 1`, `socket: is not a string` + wantPath},
		{`socket = 0x10`, `socket: is not a string` + wantPath},
		{`socket = ["/a"]`, `socket: is not a string` + wantPath},
		{`socket = {a = 1}`, `socket: is not a string` + wantPath},
		{`socket = ""`, `socket: is empty` + wantPath},
		{`socket = "csi.sock"`, `socket: "csi.sock" is not an absolute path` + wantPath},
		{`socket = "unix://csi.sock"`, `socket: "csi.sock" is not an absolute path` + wantPath},
		{`socket = "unix:/run/a.sock"`, `socket: "unix:/run/a.sock" is not an absolute path` + wantPath},
		{`socket = "tcp://1.2.3.4:5"`, `socket: "tcp://1.2.3.4:5" is not an absolute path` + wantPath},
		{`socket = "@csi"`, `socket: "@csi" is not an absolute path` + wantPath},
		{`socket = "/run/../a.sock"`, `socket: "/run/../a.sock" is not the shortest form of the path (write "/a.sock")`},
		{`socket = "/run//a.sock"`, `socket: "/run//a.sock" is not the shortest form of the path (write "/run/a.sock")`},
		{`socket = "/run/./a.sock"`, `socket: "/run/./a.sock" is not the shortest form of the path (write "/run/a.sock")`},
		{`socket = "/run/a/"`, `socket: "/run/a/" is not the shortest form of the path (write "/run/a")`},
		{`socket = "/"`, `socket: "/" is a directory` + wantPath},
		{`socket = "/a\u0000b"`, `socket: has the control character U+0000 in it (remove it)`},
		{`socket = "/a\nb"`, `socket: has the control character U+000A in it (remove it)`},
		{`socket = "/` + strings.Repeat("x", 107) + `"`, `socket: the path has 108 bytes, a Unix socket's has at most 107 (make it shorter by 1)`},
		{`socket = "unix:///` + strings.Repeat("é", 54) + `"`, `socket: the path has 109 bytes, a Unix socket's has at most 107 (make it shorter by 2)`},
		{`endpoint = "/` + strings.Repeat("x", 107) + `"`, `endpoint: the path has 108 bytes, a Unix socket's has at most 107 (make it shorter by 1)`},
		{`endpoint = 1.5`, `endpoint: is not a string` + wantPath},
		{`endpoint = "a"`, `endpoint: "a" is not an absolute path` + wantPath},
		{`enabled = "yes"`, `enabled: is not a boolean (must be true or false, without quotes)`},
		{`enabled = 1`, `enabled: is not a boolean (must be true or false, without quotes)`},
		{`timeout = 5`, `timeout: is not a string` + wantSpan},
		{`timeout = 07:32:00`, `timeout: is not a string` + wantSpan},
		{`timeout = true`, `timeout: is not a string` + wantSpan},
		{`timeout = "5"`, `timeout: "5" is not a duration` + wantSpan},
		{`timeout = "5 s"`, `timeout: "5 s" is not a duration` + wantSpan},
		{`timeout = "1d"`, `timeout: "1d" is not a duration` + wantSpan},
		{`timeout = "0s"`, `timeout: "0s" is not above zero` + wantSpan},
		{`timeout = "-5s"`, `timeout: "-5s" is not above zero` + wantSpan},
		{`timeout = "99999999h"`, `timeout: "99999999h" is not a duration` + wantSpan},
		{`withdraw_after = "soon"`, `withdraw_after: "soon" is not a duration` + wantSpan},
		{`supported_versions = "1.0.0"`, `supported_versions: is not a list` + wantVersions},
		{`supported_versions = []`, `supported_versions: has no version 1.x (the kubelet accepts no other: add "1.0.0")`},
		{`supported_versions = [1.0]`, `supported_versions: has "1" in it, which is not a version` + wantVersions},
		{`supported_versions = ["1.0"]`, `supported_versions: has "1.0" in it, which is not a version` + wantVersions},
		{`supported_versions = ["v1.0.0"]`, `supported_versions: has "v1.0.0" in it, which is not a version` + wantVersions},
		{`supported_versions = ["1.00.0"]`, `supported_versions: has "1.00.0" in it, which is not a version` + wantVersions},
		{`supported_versions = ["0.3.0", "2.0.0"]`, `supported_versions: has no version 1.x (the kubelet accepts no other: add "1.0.0")`},
		{`supported_versions = ["10.0.0"]`, `supported_versions: has no version 1.x (the kubelet accepts no other: add "1.0.0")`},
		{`when_driver_is_gone = "stay"`, `when_driver_is_gone: "stay" is not known (must be "keep" or "withdraw")`},
		{`when_driver_is_gone = "Keep"`, `when_driver_is_gone: "Keep" is not known (must be "keep" or "withdraw")`},
		{`probe_every = "-1s"`, `probe_every: "-1s" is below a second (must be "0" or a duration of at least a second such as "1m")`},
		{`probe_every = "999ms"`, `probe_every: "999ms" is below a second (must be "0" or a duration of at least a second such as "1m")`},
		{`probe_every = 0`, `probe_every: is not a string (must be "0" or a duration of at least a second such as "1m")`},
		{`when_limit_changes = "keep"`, `when_limit_changes: "keep" is not known (must be "republish" or "leave")`},
		{`socket_owner = 1000`, `socket_owner: is not a string` + wantOwner},
		{`socket_owner = ""`, `socket_owner: is empty` + wantOwner},
		{`socket_owner = "no-such-user"`, `socket_owner: there is no user "no-such-user" on this machine` + wantOwner},
		{`socket_owner = "4294967295"`, `socket_owner: "4294967295" is not a uid` + wantOwner},
		{`sokcet = "/a"`, `sokcet: is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)`},
		{`Timeout = "5s"`, `Timeout: is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)`},
		{`when-driver-is-gone = "keep"`, `when-driver-is-gone: is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)`},
		{`root_dir = "/a"`, `root_dir: is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)`},
		{`"a b" = 1`, `"a b": is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)`},
	} {
		text := "[driver.bad]\n"
		if !strings.HasPrefix(c.value, "socket =") {
			text += "socket = \"/run/bad.sock\"\n"
		}
		text += c.value + "\n" + goodTable
		line := strings.Count(text[:strings.Index(text, c.value)], "\n") + 1
		r := one(text)
		if got, want := r.Errors.Error(), place("f", line)+`: driver."bad".`+c.want; got != want {
			t.Errorf("%s\ngot  %s\nwant %s", c.value, got, want)
		}
		if _, in := r.Config.Driver("bad"); in || len(r.Faulty) != 1 || r.Faulty[0] != "bad" {
			t.Errorf("%s: in Config: %v, faulty %q", c.value, in, r.Faulty)
		}
		if _, in := r.Config.Driver("good"); !in {
			t.Errorf("%s: the other table is lost", c.value)
		}
	}
}

// A syntax error is reported for the whole file, with its line and a hint.
// The smallest values that are accepted.
func TestSmallestDurations(t *testing.T) {
	r := one("[driver.a]\nsocket = \"/run/a.sock\"\nprobe_every = \"1s\"\ntimeout = \"1ns\"\n" + "[driver.b]\nsocket = \"/run/b.sock\"\nprobe_every = \"0\"\n")
	if a, _ := r.Config.Driver("a"); len(r.Errors) > 0 || a.ProbeEvery != time.Second || a.Timeout != 1 {
		t.Errorf("%v, %+v", r.Errors, a)
	}
}

func TestSyntax(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"[driver.a]\nenabled = yes", "f:2"},
		{"[driver.a]\ntimeout = 5s", "f:2"},
		{"[driver.a]\nsocket = \"/run/a.sock\n[driver.b]", "f:2"},
		{"[driver.a]\nsocket = '/run\\u'\nendpoint = \"\\q\"", "f:3"},
		{"v = [\"1.0.0\"\ntimeout = 1", "f:2"},
		{"\n[driver.\"a.b\"\nsocket = 1", "f:2"},
		{"\n= 1", "f:2"},
		{"\n\njust words", "f:3"},
		{"[driver.a]\n[driver.b]\n[driver.'a']", "f:3"},
		{"[driver.a]\nv = [\n1]\n\nv = [\n2]", "f:5"},
	} {
		r := one(c.text)
		if got := r.Errors.Error(); !strings.HasPrefix(got, c.want+": is not valid TOML: ") || !strings.HasSuffix(got, " (see the examples in csi-registrar.toml(5))") {
			t.Errorf("%q\ngot  %s\nwant %s", c.text, got, c.want)
		}
		if len(r.Config.Drivers) > 0 {
			t.Errorf("%q: %+v", c.text, r.Config.Drivers)
		}
	}
}

// TestDocuments has documents whose errors are not in one value.
func TestDocuments(t *testing.T) {
	for _, c := range []struct{ name, text, want, drivers, faulty string }{
		{name: "several in one table, and several tables", text: `
[log]
level = "loud"
format = "xml"
[driver.a]
timeout = "5"
sokcet = "/a"
socket = "/a"
[driver.b]
socket = "/b"
[driver.c]
socket = "c"
enabled = "no"
`, want: `
f:3: log.level: "loud" is not known (must be "debug", "info", "warn" or "error")
f:4: log.format: "xml" is not known (must be "auto", "journal", "text" or "json")
f:6: driver."a".timeout: "5" is not a duration` + wantSpan + `
f:7: driver."a".sokcet: is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)
f:12: driver."c".socket: "c" is not an absolute path` + wantPath + `
f:13: driver."c".enabled: is not a boolean (must be true or false, without quotes)`,
			drivers: "b", faulty: "a c"},

		{name: "with a wrong root_dir nothing is published", text: `
[kubelet]
rootdir = "/x"
[driver.b]
socket = "/b"
`, want: `
f:3: kubelet.rootdir: is not known (known here: root_dir)`, faulty: "b"},

		{name: "no driver's table", text: `
driver = "a"
log = 1
[[kubelet]]
root_dir = "/x"
`, want: `
f:2: driver: is not a table (must be tables [driver."NAME"])
f:3: log: is not a table (must be the table [log])
f:4: kubelet: is not a table (must be the table [kubelet])`},

		{name: "double brackets", text: `
[[driver.a]]
socket = "/a"
`, want: `
f:2: driver."a": is not a table (must be a table: [driver."a"], in single brackets)`, faulty: "a"},

		{name: "the name forgotten", text: `
[driver]
socket = "/a"
`, want: `
f:3: driver."socket": is not a table (it belongs in a table [driver."NAME"])`},

		{name: "the quotes forgotten", text: `
[driver.nfs.csi.k8s.io]
socket = "/a"
[smb.csi.k8s.io]
socket = "/b"
`, want: `
f:2: driver."nfs".csi: is not known (a name with dots must be in quotes: [driver."nfs.csi…"])
f:4: smb: is not known (known here: kubelet, log, driver)`, faulty: "nfs"},

		{name: "a table's name mistyped", text: `
[drvier."nfs.csi.k8s.io"]
socket = "/a"
[drivers."q.r"]
socket = "/b"
`, want: `
f:2: drvier: is not known (known here: kubelet, log, driver)
f:4: drivers: is not known (known here: kubelet, log, driver)`},

		{name: "what is unknown at the top", text: `
level = "info"
socket = "/a"
[drivers.a]
[metrics]
`, want: `
f:2: level: is not known (known here: kubelet, log, driver)
f:3: socket: is not known (known here: kubelet, log, driver)
f:4: drivers: is not known (known here: kubelet, log, driver)
f:5: metrics: is not known (known here: kubelet, log, driver)`},

		{name: "inline and dotted", text: `
driver.a = { socket = "/a", # a comment, a = b
  tmeout = "3s", x.y = [ { z = 1 },
    "]" ] }
driver."b".'enabled' = 1
driver . b . "sock\u0065t" = "/b"
log . level = """
high"""
`, want: `
f:3: driver."a".tmeout: is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)
f:3: driver."a".x: is not known (a name with dots must be in quotes: [driver."a.x…"])
f:5: driver."b".enabled: is not a boolean (must be true or false, without quotes)
f:7: log.level: "high" is not known (must be "debug", "info", "warn" or "error")`, faulty: "a b"},

		{name: "a list of lines", text: `
[driver.a]
socket = "/a"
supported_versions = [
  "1.0.0", # [ "
  "1.1",
]
`, want: `
f:4: driver."a".supported_versions: has "1.1" in it, which is not a version` + wantVersions, faulty: "a"},

		{name: "names", text: `
[driver."../../x"]
socket = "/1"
[driver.".x"]
socket = "/1"
[driver."a b"]
[driver.Under_score-]
socket = "/3"
[driver."a\nb"]
socket = "/4"
[driver."a\u0000"]
socket = "/5"
[driver.""]
socket = "/6"
[driver.` + strings.Repeat("a", 64) + `]
socket = "/7"
[driver.` + strings.Repeat("a", 63) + `]
socket = "/8"
[driver."Foo.Example"]
socket = "/9"
`, want: `
f:2: driver."../../x": ` + refused + `it begins or ends with a dot, or has two in a row` + wantName + `
f:4: driver.".x": ` + refused + `it begins or ends with a dot, or has two in a row` + wantName + `
f:6: driver."a b": ` + refused + `only letters, digits, '-' and '.' are allowed, not ' '` + wantName + `
f:7: driver."Under_score-": ` + refused + `only letters, digits, '-' and '.' are allowed, not '_'` + wantName + `
f:9: driver."a\nb": ` + refused + `only letters, digits, '-' and '.' are allowed, not '\n'` + wantName + `
f:11: driver."a\x00": ` + refused + `only letters, digits, '-' and '.' are allowed, not '\x00'` + wantName + `
f:13: driver."": ` + refused + `it is empty` + wantName + `
f:15: driver."` + strings.Repeat("a", 64) + `": ` + refused + `it has 64 characters, at most 63 are allowed` + wantName,
			drivers: "Foo.Example " + strings.Repeat("a", 63)},

		{name: "one socket for several", text: `
[driver.z]
socket = "/s"
[driver.b]
socket = "unix:///s"
[driver.c]
socket = "/s"
enabled = false
[driver.d]
socket = "/d"
endpoint = "/s"
[driver.e]
socket = "/d"
`, want: `
f:5: driver."b".socket: is "/s", which is also driver."z".socket (f:3) (each driver has its own: write enabled = false in one of the tables, or another path)
f:11: driver."d".endpoint: is "/s", which is also driver."z".socket (f:3) (each driver has its own: write enabled = false in one of the tables, or another path)`,
			drivers: "c e z", faulty: "b d"},

		{name: "a faulty table takes nobody's socket", text: `
[driver.a]
socket = "/s"
timeout = 3
[driver.b]
socket = "/s"
`, want: `
f:3: driver."a".socket: is "/s", which is also driver."b".socket (f:6) (each driver has its own: write enabled = false in one of the tables, or another path)
f:4: driver."a".timeout: is not a string` + wantSpan,
			drivers: "b", faulty: "a"},

		{name: "no room for the registration socket", text: `
[kubelet]
root_dir = "/` + strings.Repeat("x", 78) + `"
[driver.a]
socket = "/a"
[driver.bc]
socket = "/b"
`, want: `
f:6: driver."bc": the path of its registration socket, "/` + strings.Repeat("x", 78) + `/plugins_registry/bc-reg.sock", would have 108 bytes, a Unix socket's has at most 107 (make kubelet.root_dir shorter by 1)`,
			drivers: "a", faulty: "bc"},

		{name: "no socket", text: `
[driver.a]
timeout = "3s"
[driver."NFS.csi.k8s.io"]
[driver."nfs.csi.k8s.io"]
socket = "/n"
`, want: `
f:2: driver."a": has no socket (write socket = "/run/….sock"; if the table only tunes a driver whose own file was removed, remove it)
f:4: driver."NFS.csi.k8s.io": has no socket (write socket = "/run/….sock"; if the table only tunes a driver whose own file was removed, remove it)`,
			drivers: "nfs.csi.k8s.io", faulty: "NFS.csi.k8s.io a"},

		{name: "UTF-16", text: "\xff\xfea\x00", want: `
f:1: is not valid TOML: files cannot contain NULL bytes; probably using UTF-16; TOML files must be UTF-8 (see the examples in csi-registrar.toml(5))`},
		{name: "Latin-1", text: "[log]\n# gr\xfc\xdfe\nlevel = \"info\"", want: `
f:2: is not valid TOML: invalid UTF-8 byte: 0xfc (see the examples in csi-registrar.toml(5))`},
		{name: "BOM and CRLF", text: "\ufeff[driver.a]\r\nsocket = \"/a\"\r\nfoo = 1\r\nsupported_versions = [\r\n]\r\n", want: `
f:3: driver."a".foo: is not known (known here: socket, endpoint, enabled, timeout, supported_versions, when_driver_is_gone, withdraw_after, probe_every, when_limit_changes, socket_owner)
f:4: driver."a".supported_versions: has no version 1.x (the kubelet accepts no other: add "1.0.0")`, faulty: "a"},
		{name: "a long line", text: "[log]\nlevel = \"" + strings.Repeat("x", maxLine) + "\"\n", want: `
f:2: is too long (this is not a configuration file of csi-registrar)`},
		{name: "deep", text: "log = " + strings.Repeat(strings.Repeat("[", 4000)+"\n", 12) + strings.Repeat(strings.Repeat("]", 4000)+"\n", 12), want: `
f:3: is not valid TOML: arrays and inline tables are nested more than the maximum of 10000 levels deep (see the examples in csi-registrar.toml(5))`},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := one(c.text)
			if got, want := r.Errors.Error(), strings.TrimPrefix(c.want, "\n"); got != want {
				t.Errorf("\ngot\n%s\nwant\n%s", got, want)
			}
			var drivers []string
			for _, d := range r.Config.Drivers {
				drivers = append(drivers, d.Name)
			}
			if got := strings.Join(drivers, " "); got != c.drivers {
				t.Errorf("drivers %q, want %q", got, c.drivers)
			}
			if got := strings.Join(r.Faulty, " "); got != c.faulty {
				t.Errorf("faulty %q, want %q", got, c.faulty)
			}
		})
	}
}
