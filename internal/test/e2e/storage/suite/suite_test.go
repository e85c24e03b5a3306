// Package suite has Kubernetes' own storage tests for CSI drivers, from k8s.io/kubernetes/test/e2e,
// without the other e2e tests, because it links in a tenth of the time. The flags are those of
// e2e.test; --storage.testdriver=FILE defines the driver. Package storage runs it.
package suite

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	"k8s.io/component-base/logs"
	"k8s.io/kubernetes/test/e2e/framework"
	"k8s.io/kubernetes/test/e2e/framework/config"
	e2enode "k8s.io/kubernetes/test/e2e/framework/node"
	// Checks after each test that the node is ready.
	_ "k8s.io/kubernetes/test/e2e/framework/node/init"
	_ "k8s.io/kubernetes/test/e2e/storage/external" // --storage.testdriver
	"k8s.io/kubernetes/test/utils/image"
)

func TestMain(m *testing.M) {
	images := flag.Bool("images", false, "print the names of the images that the tests use")
	socket := flag.String("driver-socket", "", "test volumes that are created beforehand, too, by the driver at this socket")
	config.CopyFlags(config.Flags, flag.CommandLine)
	framework.RegisterCommonFlags(flag.CommandLine)
	framework.RegisterClusterFlags(flag.CommandLine)
	flag.Parse()
	if *images {
		printImages()
		return
	}
	if *socket != "" {
		if err := describePreprovisioned(*socket); err != nil {
			fmt.Fprintln(os.Stderr, "error: cannot ask the driver:", err)
			os.Exit(1)
		}
	}
	framework.AfterReadingAllFlags(&framework.TestContext)
	os.Exit(m.Run())
}

// printImages prints a line for each image: its kind and its name.
func printImages() {
	for word, id := range map[string]image.ImageID{
		"agnhost": image.Agnhost, "pause": image.Pause,
		"shell": image.BusyBox, "shell-nginx": image.Nginx, "shell-glibc": image.GlibcDnsTesting,
	} {
		word, _, _ = strings.Cut(word, "-")
		fmt.Println(word, image.GetE2EImage(id))
	}
}

func TestStorage(t *testing.T) {
	logs.InitLogs()
	defer logs.FlushLogs()
	gomega.RegisterFailHandler(framework.Fail)
	suiteConfig, reporterConfig := framework.CreateGinkgoConfig()
	ginkgo.RunSpecs(t, "Kubernetes storage tests", suiteConfig, reporterConfig)
}

// The part of the set-up of test/e2e that storage tests need.
var _ = ginkgo.SynchronizedBeforeSuite(func(ctx context.Context) {
	c, err := framework.LoadClientset()
	framework.ExpectNoError(err)
	framework.ExpectNoError(e2enode.WaitForAllNodesSchedulable(ctx, c, time.Minute))
}, func(context.Context) {
	framework.TestContext.CloudConfig.NumNodes = 1
	framework.TestContext.IPFamily = "ipv4"
})
