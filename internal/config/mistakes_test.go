package config

import (
	"strings"
	"testing"
)

func TestTry(t *testing.T) {
	ok := "[driver.\"good.csi.io\"]\nsocket = \"/run/good.sock\"\n"
	for _, in := range []string{
		"[driver.\"a.b\"]\nsocket = /run/x\n" + ok,
		"[driver.\"a.b\"]\nsocket = \"/run/x\n" + ok,
		"[driver.\"a.b\"]\nsocket = \"/run/x\"\nsupported_versions = [\"1.0.0\"\n" + ok,
		"[driver.\"a.b\"]\nsocket = \"/run/x\"\nsupported_versions = [\"1.0.0\"\n",
		"[driver.\"a.b\"\nsocket = \"/run/x\"\n" + ok,
		"[driver.\"a.b\"]\nsocket\n" + ok,
		"[driver.\"a.b\"]\nenabled = yes\n" + ok,
		"[driver.\"a.b\"]\ntimeout = 5s\nsocket=1\n" + ok,
		"[driver.\"a.b\"]\nsocket=\"/a\"\n" + ok + "[driver.\"a.b\"]\nsocket=\"/b\"\n",
		"[driver.\"a.b\"]\nsocket=\"/a\"\nsocket=\"/b\"\n" + ok,
		"driver.a.socket = 'x\n[driver.b]\nsocket='/b'\n",
		"[driver.nfs.csi.k8s.io]\nsocket='/b'\n",
		"[nfs.csi.k8s.io]\nsocket='/b'\n",
		"[\"nfs.csi.k8s.io\"]\nsocket='/b'\n",
		"[driver]\nsocket='/b'\n",
		"[[driver]]\nsocket='/b'\n",
		"[[driver.a]]\nsocket='/b'\n",
		"driver = 1\nlog = 'x'\n[[kubelet]]\n",
		"level = 'x'\nroot_dir = 'x'\nfoo=1\nsocket=1\n[drivers.x]\n[empty]\n",
		"[driver.a]\nSocket='/b'\nendpont='/b'\nfoo=1\nroot_dir='/'\nwhen-driver-is-gone='keep'\n",
		"[driver.a]\nsocket=1\nendpoint=1.5\nenabled='yes'\ntimeout=5\nsupported_versions='1.0.0'\nwhen_driver_is_gone=true\nwithdraw_after=07:32:00\nsocket_owner=1000\n",
		"[driver.a]\nsocket='a/b'\nendpoint='/a/../b'\ntimeout='5 s'\nsupported_versions=[]\nwhen_driver_is_gone='stay'\nwithdraw_after='-3s'\nsocket_owner='nobody-here'\n",
		"[driver.a]\nsocket='unix:/a/b'\nendpoint='/a//b/'\ntimeout='0s'\nsupported_versions=[\n'1.0.0',\n'v2']\nwhen_driver_is_gone=''\nwithdraw_after='3'\nsocket_owner='4294967295'\n",
		"[driver.a]\nsocket='@x'\nendpoint='/'\nsupported_versions=[\n'0.3.0',\n'2.0.0']\nsocket_owner=\"a\\u0000\"\n",
		"[driver.a]\nsocket='/" + strings.Repeat("x", 107) + "'\nendpoint=\"/a\\u0000\\nb\"\nsupported_versions=[\n1]\nsocket_owner=''\n",
		"[driver.'../../x']\nsocket='/a'\n[driver.'.x']\nsocket='/a'\n[driver.'a b']\nsocket='/a'\n[driver.Under_score-]\nsocket='/a'\n[driver.\"a\\nb\"]\nsocket='/a'\n[driver.\"a\\u0000\"]\nsocket='/c'\n[driver.'']\nsocket='/a'\n[driver." + strings.Repeat("a", 64) + "]\nsocket='/d'\n",
		"[log]\nlevel='loud'\nformat='xml'\n[kubelet]\nroot_dir='kubelet'\n",
		"[driver.a]\nsocket='/s'\n[driver.b]\nsocket='/s'\n[driver.c]\nsocket='/s'\nenabled=false\n[driver.d]\nsocket='/d'\nendpoint='/s'\n",
		"[kubelet]\nroot_dir='/" + strings.Repeat("x", 90) + "'\n[driver.a]\nsocket='/s'\n",
		"[driver.a]\ntimeout='3s'\n[driver.'NFS.csi.io']\ntimeout='1s'\n[driver.'nfs.csi.io']\nsocket='/x'\n",
		"driver.a = { socket='/x', tmeout='3', \nlog={a=1} }\ndriver = { }\n",
		"driver.a = { socket='/x', tmeout='3', \nlog={a=1} }\n",
		"\x00\x01",
		"[log]\nlevel = \"\xff\"\n",
		"a\rb",
	} {
		l := newLoader(userExists)
		l.apply(file{path: "f"}, in)
		r := l.result()
		t.Logf("%s\n--\n%v\nfaulty %q warn %v\n", in, r.Mistakes, r.Faulty, r.Warnings)
		if strings.Contains(in, "good.csi.io") {
			if _, ok := r.Config.Driver("good.csi.io"); !ok {
				t.Error("lost")
			}
		}
	}
}
