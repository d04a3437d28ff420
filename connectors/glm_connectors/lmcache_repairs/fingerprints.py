"""SHA-256 of every symbol of LMCache that the repairs replace or lean on, as tested; see `contract`.

`python -m glm_connectors.lmcache_repairs.contract` prints this table for the installed LMCache. A new pin is
a new table only after the repairs' tests have passed against it.
"""

from __future__ import annotations

# ruff: noqa: E501

VERSION = "0.5.6"

_BY_MODULE: dict[str, dict[str, str]] = {
    "lmcache.v1.storage_backend.job_executor.pq_executor": {
        "AsyncPQExecutor": "de1f209f2a3a153d622cfd50e270a81ae05ea3dcca5a9e456cc02bb19e4fe873",
        "AsyncPQThreadPoolExecutor": "a5875122ecf3e83e1d8fa28b5c3a47212d286debd10668c876563049b58f9f25",
    },
    "lmcache.v1.storage_backend.local_cpu_backend": {
        "LocalCPUBackend.allocate": "8485272f0175b48f17268f2111715526f19d211fbfc7135958a40b46fbf0e672",
        "LocalCPUBackend.batched_allocate": "4c5c5a96c55f3a7241cda96031cd74f013f72880892335285f612f783194dd52",
    },
    "lmcache.v1.storage_backend.remote_backend": {
        "RemoteBackend.__init__": "68ac278cd49e1d862b89de92a547f347f30b8824b98d4bc47085efe68789d1bc",
        "RemoteBackend.get_blocking": "ee6a45ba73e32f7b6d34abcf2e0cb27fb5e382e82a41915cbe499831122dc9d0",
        "RemoteBackend.batched_get_blocking": "0ad15aaa3707ab3f9be36098a33629eac7f432c260eb636dfc51399de51ebc85",
        "RemoteBackend.submit_put_task": "26179684cc3e0327154ee75a79b795732ff2de5abe2912c296f34a923be37ddc",
        "RemoteBackend.batched_submit_put_task": "dfa1aaeb776754f79258b13c0f69c87e80924c02db81b5dc20887eaa0fb3ec8b",
        "RemoteBackend.put_callback": "ab0cce6f7fb2ba80a56084eb774d72a58a89b0aad7c074b77c874a7159a2789b",
        "RemoteBackend.batched_put_callback": "5c50cd312d5411e477091ebd5903201a889b559e90e6136ddff91a316a2e8ccc",
    },
    "lmcache.v1.storage_backend.connector.instrumented_connector": {
        "InstrumentedRemoteConnector.put": "ba7fd0d6dadbcebe775bdd95fbe14801148c75e3abbdc0622002ca5804c1b55e",
        "InstrumentedRemoteConnector.batched_put": "14885904dcec1c3b13e0f8f092e51a87e480886bd70b7fc19b44b1469cfc1ecb",
    },
    "lmcache.v1.storage_backend.connector.redis_connector": {
        "RESPConnector.close": "14f48bcf1d570aae118aa071cb6b239a49ff08b736ec6f7a7e78dfd57e34f8c8",
        "RedisConnector.__init__": "ef12182d61550898c0d7f2b7ca8c309506ed72f39d0a509d36694dfaf8263d7f",
        "RedisConnector._batched_put": "fdd0e6d2d80bdecde5e16930fef792623770b29ab3fbf0e352d470a631d45f13",
        "RedisConnector._put": "1d60598d05da11d2e80e95be07897a9c3e6521c061b42e46d6a9fcdc04147d75",
        "RedisConnector.close": "a04943cc814d92df49c5840f20715e749a87a7ef85ce4b30162a3fd110818a4d",
        "RedisClusterConnector.__init__": "2fd6d8578917dac35240b2db094a236fba36599ea434cdfe2f004cb4adc34027",
        "RedisClusterConnector._batched_put": "fdd0e6d2d80bdecde5e16930fef792623770b29ab3fbf0e352d470a631d45f13",
        "RedisClusterConnector._put": "af8247f067a11c438a8ceb1ed9c845fd2f4eb3016213cd69f21f29cc6e568b34",
        "RedisClusterConnector.close": "e6856b704176bdc26b46660d21888e0ec52b9a28460b180ba7a9fa7e3683e521",
        "RESPConnector._get": "c3ef597992ec9cc1b35543c92c09f65724a75e1f96cf4264346177470b71f018",
        "RESPConnector._batched_get": "059f765c6ff725caac3086abeaea251e1d36f0ba35d6f9d2cbb14942a23a2256",
        "RESPConnector.batched_get_non_blocking": "e5be3eea30ae2e3d5e98d632157e4f45fd3560877bae50be6e14d26ada6c45f6",
        "RedisConnector._get": "e9dd80dfcc5085cbee7c98ecc541a83e07491df1f97243fed501a7b0be654c48",
        "RedisConnector._batched_get_non_blocking": "c59a3e74af47bc28ddd57a436308eee845e3ff0d535fc6732ebb69d3a26d531f",
        "RedisClusterConnector._get": "543219c9c6dd6516622fdadcc2ee9751ed2e0dc9467a7b1677dd3a904416a966",
        "RedisClusterConnector._batched_get_non_blocking": "c59a3e74af47bc28ddd57a436308eee845e3ff0d535fc6732ebb69d3a26d531f",
    },
    "lmcache.v1.storage_backend.connector.valkey_connector": {
        "ValkeyConnector._get": "8fe1017b9fe0aa0051702ce60f47da753d0e6b5f20cddf4a9e3c8c6a383abf99",
        "ValkeyConnector._put": "5f3ffe5e8913fd10f3d8e6566a7bb4f074e3c08b1a2816bf0c2fb008f2f04f9c",
        "ValkeyConnector._batched_put": "8f7bb8ba6e77de8eaa16323f48bf8a900b185f6ff4398e16c7b3bc2e99ea7511",
        "ValkeyConnector._batched_get": "8010e1c936f77585222c06eaa6314aa609832a0769eec519e8da5816d58f7a0e",
        "ValkeyConnector._batched_get_non_blocking": "547c61747cb14623cbd4ada93e9297da29ebbe9da8648c71d01d1b5b4ab93998",
        "ValkeyConnector.close": "10694dfffac2b62586a6abd93270feacc0f399de29da84edf5c88ab815cf45fb",
    },
    "lmcache.v1.storage_backend.valkey.worker_pool": {
        "ValkeyWorkerPool.submit_set": "ee0fbc0bde718246b8abe973309c907f37af08f1645d2f8f90d9249d5134cb11",
        "ValkeyWorkerPool.submit_get_into": "d652308a2c49a60b920d6c3c4c13c32c1b3e4b47c1b8471fbc8294fe3e1909a2",
        "ValkeyWorkerPool.submit_exists": "10b6896386240246ca9616c3ab36509d14f75c1bb883e271d83978a6f50dd857",
        "ValkeyWorkerPool._do_set": "6619b75ce39c69deebf62c5ccefda052a2de897bda25385f93c3602174f8fc68",
        "ValkeyWorkerPool._do_get_into": "0a4448ad4e6954f9260b1161e8d6c8f37d74b989250acc1731eacba23e76f547",
        "ValkeyWorkerPool._do_exists": "4a9f9e05ed161018bf47b45c09577d326730cb48fce2f23fbf2659e026c2fa09",
    },
    "lmcache.v1.storage_backend.connector.s3_connector": {
        "S3Connector.get": "768033b6f15a17b1eac2c78e7c662821f784ff83c0e5ead99e1837ca10420d07",
        "S3Connector.batched_get": "2d8016f9beb475968e47521c4121fa967b2db5b3f107ef535a6e10b34e82e57c",
        "S3Connector._put": "bbf1eb9ceeb81327abc06a9b4cf7fc52f8c6d8bd2abae9d2b408ff0210405e3d",
        "S3Connector.close": "271126d22672e8803080b101ce9287e99a9c0ddeb2768f92742b9469a68c2278",
        "S3Connector._batched_get_non_blocking": "a63d9aa205602339818f1eb343571ac24fd35de2e980558ca8a6056197c2686a",
    },
    "lmcache.v1.storage_backend.connector.eic_connector": {
        "EICConnector._get": "e449c2de110c736caaa722fcd266e4a59d627857e382d9f90e4365861b432733",
        "EICConnector._batched_get": "5e11b7a1c3300d56e1d9174cdf935590b143d7d5425a3a7e9ec5cde1834d77f0",
        "EICConnector.close": "b52fd559b8d427a10492cd74a3af65f3d26bfd314aa4c12d02a57eb9fd44c200",
        "EICConnector._batched_get_non_blocking": "c59a3e74af47bc28ddd57a436308eee845e3ff0d535fc6732ebb69d3a26d531f",
    },
    "lmcache.v1.storage_backend.connector.sagemaker_hyperpod_connector": {
        "SageMakerHyperPodConnector.batched_get": "10bf4e6a15f6602e914d450c28ffcf91273bd11bc02d15ac2d1e61dfed9004f4",
        "SageMakerHyperPodConnector._batched_async_contains": "1c28bd92d7a105a5fd9bfa91025d90244210452a9bd39143dabdf9ab251a58ab",
        "SageMakerHyperPodConnector.close": "0541cc5bfa7ce2bdef5382fae2d9a2b4cf95253552c1ea99ccfced1a3f6d72eb",
        "SageMakerHyperPodConnector._batched_get_non_blocking": "4ae2d65dab706e54e0a3ce10f70418d785cfe354ca0213fc4c87625a9d3332f9",
    },
    "lmcache.v1.storage_backend.native_clients.connector_client_base": {
        "ConnectorClientBase.batch_get": "680b062111496f42589f9ed61a48dff506312195d8e9152d6eb154a137236560",
        "ConnectorClientBase.batch_set": "224f09ac9376d6045a53ba865563b2afe05171e0cbb2ff38f1ed8e6dbcc9a212",
        "ConnectorClientBase._on_ready": "8331969d0870b37f780cdf4c0ca29b1ca36eab5b867c87ecce376b333dbd0597",
        "ConnectorClientBase._register_future_async": "41e5e09449b2884b245fff1141525aa147d45865dccc6cb13e14585a6fe9c5a6",
        "ConnectorClientBase.close": "a6887825fd5c29a38bfe68a9840e480de4df76f7147dcd839824d4c16cf1109e",
    },
    "lmcache.v1.storage_backend.connector.mock_connector": {
        "MockConnector.close": "bff2dd7e8af7b34b03c4c3906294b36f9197e326597a33df04e4c63aa2ac432f",
    },
    "lmcache.v1.storage_backend.connector.bigtable_connector": {
        "BigtableConnector.close": "30635db75c0eb36f641b39c1e6f7cd47a9942d2ea50705d9c4f8d7162a895676",
    },
    "lmcache.v1.storage_backend.local_disk_backend": {
        "LocalDiskWorker.submit_task": "6dba0edb5e82885beb64f63b437e35ad2fd3c201c79c932b6f09ac3c8b76286c",
        "LocalDiskWorker.remove_put_task": "286e10e80394385ee15fa21eb851ebbb7181eae398b8212dd817221c0007fcad",
        "LocalDiskWorker.close": "d8ff3c2d780ab2316a22d364eae070164a5c85bdf6cbdd551f978c1e53f87a17",
        "LocalDiskBackend.submit_put_task": "a1dd422c0e127f058a860b16a752e99de69ed16500a096f72eedd9640939c505",
        "LocalDiskBackend.async_save_bytes_to_disk": "fb1cf1c45a8b6290fb571d312219c25aae592bbf57604b95ba531b71c9fabd41",
        "LocalDiskBackend.batched_get_non_blocking": "0d14e8cafe9ecdddcabf3e02d97f3aaf09a359632061097dd8928c435d552026",
        "LocalDiskBackend.batched_async_load_bytes_from_disk": "740a33d2595a6a255b6d14620ad73d91450095d4131dddbd13baed4c667bfcda",
        "LocalDiskBackend.insert_key": "eb3ab1cce1e380745be0673508f591d00ca3152a31c1415b063b9c2570418b6c",
        "LocalDiskBackend.unpin": "1abacea201a235a8bf29d7554836d41919b182161dcbb0d52d00c66819f3bd26",
        "LocalDiskBackend.write_file": "b0be1992806a8afe6aaa3f046e16122fdc8cfdead940a5eb8abab79926fd7148",
        "LocalDiskBackend.read_file": "59960598ff2c8bdefc16297a6340948fd8b9f7c060af83f56cd3ab2de91d5d78",
    },
    "lmcache.v1.storage_backend.storage_manager": {
        "StorageManager.async_lookup_and_prefetch": "28b339e96853de4d414d71c4cd38dceb0b3478568e9d9324d5c3498e977b5318",
        "StorageManager.prefetch_all_done_callback": "6f177d2ccb36b3f0d8d143e3b999a1ed899db947711f4d0ce27ab53142529ab4",
        "StorageManager.prefetch_single_done_callback": "5482f0d1c369427547a9a6430098291195a70a33a403e646c58bb545e7f61612",
        "StorageManager.get_active_storage_backends": "026cbb306e4b490ac0513dd5e9ee6b4c0c7cd99a2e39d3a17fb393dbdf478c52",
        "AsyncSingleSerializer.run": "8bd1698c77ada612736f182ab20e9f2d50f0eaa71aee877c031633200e83f623",
    },
    "lmcache.v1.lookup_client.lmcache_async_lookup_client": {
        "LMCacheAsyncLookupClient": "2a292437783d47518541bede9cd004c164853df596d2b25a4a296ff39a726066",
        "LMCacheAsyncLookupServer": "8bca7622946752b29aa0d426363c53e8a78fb4e59916c98decb40f95071d82b6",
    },
    "lmcache.v1.lookup_client.async_lookup_message": {
        "LookupRequestMsg": "852df7624458d87c1c1222727a133d14c8f036d2caca907875d889ebf85d283e",
        "LookupResponseMsg": "61944b2224d0387979d85819e0a0bdf958c31f3518b567ae10f78a8bc18d976c",
        "LookupCleanupMsg": "c9aacb1d57a302580eed09fecbf5790bba279b4e544fc361f253e571fe9e5aab",
    },
    "lmcache.v1.rpc_utils": {
        "get_zmq_rpc_path_lmcache": "94ae4a203d39a4311d64284e23a6308aa6882280386317c43066b6033eee229f",
    },
    "lmcache.v1.cache_engine": {
        "LMCacheEngine.async_lookup_and_prefetch": "dcae2b8ecd8962c96aea7e4b52607d266d339be04d2cbee61ddabf5f5ee22d56",
        "LMCacheEngine.cleanup_memory_objs": "e1969f60cbe3e44655764f4a71f9af4c0bb83d7b9fce80f4eba382d10ffd2feb",
        "LMCacheEngine._async_process_tokens_internal": "322bf0a3bc40519de8ee42541647195e6d3617f851c9a42bcec0f5867a239a2a",
        "LMCacheEngine.retrieve": "8f88934dcffb92286b8e512d7f2e1737a53fc9faddbb6c70f3b8abc0cb813f1a",
        "LMCacheEngine.lookup_unpin": "4293d6cee328bdbe6abdb9ed8a17ff2f8e1f06189e1e66db22d52afd2a9a8b5d",
        "LMCacheEngine.store": "a3f0ac44eeac16e071090bf5a8998418c1d6ca9c1c1b88d70da1f08d80197940",
    },
    "lmcache.v1.event_manager": {
        "EventManager": "d80380791b94f7e396719f59a8d9c9c195edd6ca842db989ead98d627c44f95d",
    },
}

TESTED = {f"{module}:{name}": sha for module, names in _BY_MODULE.items() for name, sha in names.items()}
